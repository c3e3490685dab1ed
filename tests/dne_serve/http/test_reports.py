"""The report of every kind of version that the real commands made, over HTTP."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dne_serve.access.permission import new_token
from dne_serve.http import pages
from model_store.codec import encode_images
from model_store.maintenance.forget import forget_class
from model_store.records.manifest import ClassImages, Draft, Manifest
from model_store.records.quality import Gate, JudgedImage, Metrics
from model_store.store import shard
from model_store.store.shard import decode_images, shard_ref
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server
from tests.tiny_versions import flip_last_bit, publish_tiny
from tests.trained_store import TrainedStore

HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def trained(trained_store: TrainedStore) -> Iterator[Live]:
    with live_server(trained_store.location) as live:
        live.wait_until_ready()
        yield live


def told(live: Live, version: int) -> dict[str, Any]:
    found: dict[str, Any] = live.http.get(f"/versions/{version}/report.json").json()
    return found


def test_a_refused_version_tells_why_and_what_it_got_wrong(
    trained: Live, trained_store: TrainedStore
) -> None:
    report = told(trained, trained_store.refused)
    assert report["gate"] == "refused"
    assert "less than the 100.0 % asked for" in report["reasons"][0]
    assert report["judged"]
    wrong = sum(one["images"] for one in report["confused"])
    assert wrong == sum(one["answer"] != one["label"] for one in report["pictures"]) > 0
    for name in ("all", "old", "new"):
        one = report["accuracy"][name]
        assert one["low"] <= one["share"] <= one["high"]
        assert one["images"] > 0


def test_a_shard_that_is_too_large_is_not_read_for_a_picture(
    trained: Live, trained_store: TrainedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "MAX_KEPT_BYTES", 10)
    number = told(trained, trained_store.refused)["pictures"][0]["number"]
    answer = trained.http.get(f"/versions/{trained_store.refused}/report/images/{number}")
    assert_problem(answer, 404, says="too large to be shown")


def test_a_picture_is_the_held_out_image_that_the_report_names(
    trained: Live, trained_store: TrainedStore
) -> None:
    store = Store.open(str(trained_store.location))
    manifest = store.manifest(trained_store.refused)
    entries = {one.class_name: one for one in manifest.held_out}
    pictures = told(trained, trained_store.refused)["pictures"]
    assert len(pictures) == len(manifest.metrics.shown)
    for one, noted in zip(pictures, manifest.metrics.shown, strict=True):
        path = f"/versions/{trained_store.refused}/report/images/{one['number']}"
        answer = trained.http.get(path)
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["cache-control"] == "no-store"
        entry = entries[one["label"]]
        held = decode_images(store.read_shard(entry.shard), count=entry.count)[noted.image]
        assert np.array_equal(_pixels(answer.content), _pixels(held))


def _pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_the_images_that_are_noted_are_answered_as_noted(
    trained: Live, trained_store: TrainedStore
) -> None:
    version = trained_store.refused
    for one in told(trained, version)["pictures"]:
        image = trained.http.get(f"/versions/{version}/report/images/{one['number']}").content
        [found] = trained.predict(image, query=f"?version={version}").json()["predictions"]
        assert found["label"] == one["answer"]
        assert found["score"] == pytest.approx(one["confidence"], abs=0.01)


def test_growth_follows_the_lineage_and_not_the_numbers(
    trained: Live, trained_store: TrainedStore
) -> None:
    growth = told(trained, trained_store.branch)["growth"]
    lineage = [trained_store.first, trained_store.second, trained_store.branch]
    assert [one["version"] for one in growth] == lineage
    assert [one["tasks"] for one in growth] == [1, 2, 3]
    for older, newer in pairwise(growth):
        assert older["parameters"] < newer["parameters"]
        assert older["gflop"] < newer["gflop"]
    again = told(trained, trained_store.branch)["growth"]
    assert again == growth  # from what was kept


def test_the_run_is_told_without_folders_and_hosts(
    trained: Live, trained_store: TrainedStore
) -> None:
    report = told(trained, trained_store.first)
    run = report["run"]
    assert run["command"].startswith("dne-train add-task --data letters ")
    assert "/" not in run["command"]
    assert "--store" not in run["command"]
    assert "--checkpoint" not in run["command"]
    assert socket.gethostname() not in run["machine"]
    assert run["seed"] == 0
    assert run["seconds"] > 0
    assert report["latency"] == {"milliseconds": run["latency_ms"], "version": trained_store.first}
    assert report["training"]["epochs"] == 3


def test_calibration_and_scores_count_every_held_out_image(
    trained: Live, trained_store: TrainedStore
) -> None:
    for version in (trained_store.first, trained_store.refused, trained_store.extension):
        report = told(trained, version)
        bins = report["calibration"]["bins"]
        assert sum(one["right"]["images"] for one in bins) == report["images"]
        right = sum(one["right"]["share"] * one["right"]["images"] for one in bins)
        assert right == pytest.approx(report["accuracy"]["all"]["share"] * report["images"])
        assert sum(report["unknown"]["scores"]["counts"]) == report["images"]


def test_a_version_that_only_renames_says_whose_figures_it_shows(
    trained: Live, trained_store: TrainedStore
) -> None:
    report = told(trained, trained_store.renaming)
    assert not report["judged"]
    assert f"those of version {trained_store.third}" in report["notes"][0]
    assert (report["pictures"], report["run"]) == ([], None)
    assert "nothing was learnt" in report["pictures_note"]


def test_a_forgotten_class_takes_its_pictures_out_of_the_report(
    trained_copy: TrainedStore,
) -> None:
    version = trained_copy.refused
    with live_server(trained_copy.location) as live:
        live.wait_until_ready()
        before = told(live, version)["pictures"]
        gone = before[0]["label"]
        store = Store.open(str(trained_copy.location))
        forget_class(store, gone, actor="tests", reason="asked to")
        after = told(live, version)
        assert [one["label"] for one in after["pictures"]] == [
            one["label"] for one in before if one["label"] != gone
        ]
        assert after["pictures_note"] == f"The pictures of {gone} were forgotten."
        path = f"/versions/{version}/report/images/{before[0]['number']}"
        assert live.http.get(path).status_code == 404


def test_the_page_has_the_policy_of_all_pages_and_no_byte_of_the_store(
    trained: Live, trained_store: TrainedStore
) -> None:
    answer = trained.http.get(f"/versions/{trained_store.first}/report", headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == pages.POLICY
    assert answer.text == (pages.CONSOLE / "report.html").read_text()


def test_a_version_that_is_not_there_is_404_for_browsers_and_programs(trained: Live) -> None:
    browser = trained.http.get("/versions/99/report", headers=HTML)
    assert (browser.status_code, browser.headers["content-type"][:9]) == (404, "text/html")
    for path in ("report", "report.json", "report/images/0"):
        answer = trained.http.get(f"/versions/99/{path}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    assert trained.http.get("/versions/1/report/images/24").status_code == 400


def test_a_server_with_tokens_shows_the_page_that_asks_for_one(
    trained_store: TrainedStore, tmp_path: Path
) -> None:
    made = new_token("someone=read")
    (tmp_path / "tokens").write_text(made.line)
    with live_server(trained_store.location, token_file=tmp_path / "tokens") as live:
        browser = live.http.get("/versions/1/report", headers=HTML)
        assert (browser.status_code, browser.headers["content-type"][:9]) == (401, "text/html")
        assert "Bearer" in browser.headers["www-authenticate"]
        unknown = live.http.get("/versions/99/report", headers=HTML)
        assert unknown.status_code == 401  # nobody learns which versions there are
        for path in ("report", "report.json", "report/images/0"):
            assert live.http.get(f"/versions/1/{path}").status_code == 401
        bearer = {"Authorization": f"Bearer {made.secret}"}
        assert live.http.get("/versions/1/report.json", headers=bearer).status_code == 200


def _with_picture(store: Store, image: bytes) -> Manifest:
    """A version that shows one held-out image of class a."""
    first = publish_tiny(store)
    shard = encode_images([image])
    entry = ClassImages(class_name="a", shard=shard_ref("held-out", shard), count=1)
    shown = JudgedImage(class_name="a", image=0, answer="b", confidence=0.5)
    kept = {name: getattr(first, name) for name in Draft.model_fields}
    draft = Draft.model_validate(
        {
            **kept,
            "parent": first.version,
            "parent_digest": first.digest,
            "held_out": (entry,),
            "metrics": Metrics(shown=(shown,), gate=Gate(passed=True), images=1),
        }
    )
    return store.publish(draft, shards={entry.shard.sha256: shard})


def test_bytes_that_are_no_picture_are_not_served(store: Store) -> None:
    version = _with_picture(store, b"<svg onload=alert(1)>").version
    with live_server(Path(store.location)) as live:
        answer = live.http.get(f"/versions/{version}/report/images/0")
        assert answer.status_code == 404
        assert b"svg" not in answer.content


def test_a_damaged_shard_of_pictures_is_503(store: Store) -> None:
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, format="PNG")
    manifest = _with_picture(store, written.getvalue())
    flip_last_bit(store, manifest.held_out[0].shard)
    with live_server(Path(store.location)) as live:
        path = f"/versions/{manifest.version}/report"
        assert live.http.get(f"{path}/images/0").status_code == 503
        assert live.http.get(f"{path}.json").status_code == 200
