from __future__ import annotations

from pathlib import Path

import pytest

from model_store.delete import delete_version
from model_store.manifest import Manifest
from model_store.store import Store
from tests.live_server import Live, assert_problem, live_server, png
from tests.tiny_versions import publish_tiny


def test_versions_lists_what_is_there_and_what_is_served(
    live: Live, store: Store, digits: Manifest
) -> None:
    publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    body = live.http.get("/versions").json()
    assert (body["served"], body["channel"], body["mode"]) == (2, "production", "follow")
    assert [one["version"] for one in body["versions"]] == [1, 2, 3]
    second = body["versions"][1]
    assert (second["parent"], second["tasks"], second["classes"]) == (1, 2, 5)
    assert second["new_classes"] == ["0", "1", "2"]
    assert second["accuracy"]["all"] == 0.9
    assert 0 < second["delta_bytes"] < second["total_bytes"]
    assert [(one["number"], one["target"]) for one in body["history"]] == [(1, 1), (2, 2)]


def test_an_unreadable_manifest_does_not_hide_the_others(live: Live, store: Store) -> None:
    publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    path = Path(store.location, "versions", "00000003.json")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"odd"', b'"ode"'))
    rows = live.http.get("/versions").json()["versions"]
    assert [one["version"] for one in rows] == [1, 2, 3]
    assert [bool(one["error"]) for one in rows] == [False, False, True]
    assert_problem(live.http.get("/versions/3"), 503)


def test_a_version_shows_what_it_is_made_of(live: Live, digits: Manifest) -> None:
    body = live.http.get("/versions/2").json()
    assert (body["version"], body["parent"], body["digest"]) == (2, 1, digits.digest)
    assert body["classes"] == ["a", "b", "0", "1", "2"]
    assert [task["name"] for task in body["tasks"]] == ["letters", "digits"]
    assert [shard["kind"] for shard in body["shards"]] == ["expert", "expert", "classifier"]


def test_a_version_that_does_not_exist_is_404(live: Live) -> None:
    assert_problem(live.http.get("/versions/3"), 404, says="no version 3")
    assert_problem(live.http.get("/classes?version=3"), 404)
    for name in ("x", "0", "-1", "..%2f..%2fstore.json", "1e0"):
        assert live.http.get(f"/versions/{name}").status_code in (400, 404)


def test_classes_come_in_the_order_of_the_outputs(live: Live) -> None:
    body = live.http.get("/classes").json()
    assert body["version"] == 2
    assert [(one["label"], one["task"]) for one in body["classes"]] == [
        ("a", "letters"),
        ("b", "letters"),
        ("0", "digits"),
        ("1", "digits"),
        ("2", "digits"),
    ]
    assert len(live.http.get("/classes?version=1").json()["classes"]) == 2


def test_ready_says_what_serves(live: Live) -> None:
    answer = live.http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "version": 2,
        "channel": "production",
        "mode": "follow",
        "record": 2,
        "head": 2,
        "fallback": False,
        "backend": "torch",
        "device": "cpu",
        "canary": None,
        "shadow": None,
        "error": None,
    }


def test_without_a_store_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent") as live:
        assert live.http.get("/healthz").status_code == 200
        assert_problem(live.http.get("/readyz"), 503, says="no store yet")
        assert_problem(live.http.get("/versions"), 503)
        assert_problem(live.http.get("/classes"), 503)
        assert str(tmp_path) not in live.http.get("/readyz").text


def test_an_empty_store_is_not_ready_and_lists_nothing(store: Store) -> None:
    with live_server(Path(store.location)) as live:
        assert_problem(live.http.get("/readyz"), 503, says="names no version")
        assert live.http.get("/versions").json()["versions"] == []


def test_a_store_that_appears_is_picked_up(tmp_path: Path) -> None:
    with live_server(tmp_path / "later") as live:
        assert live.http.get("/readyz").status_code == 503
        store = Store.create(str(tmp_path / "later"))
        made = publish_tiny(store)
        store.promote(made.version, channel="production", actor="tests", reason="")
        live.wait_until_ready()
        assert live.predict(png()).json()["version"] == 1


def test_metrics_count_requests_images_and_swaps(live: Live) -> None:
    live.predict(png(), png())
    live.http.get("/nowhere/at/all")
    live.http.get("/versions/1")
    live.admin("/rollback", to=1)
    assert live.metric('dne_requests_total{method="POST",route="/predict",status="200"}') == 1
    assert live.metric('dne_requests_total{method="GET",route="unmatched",status="404"}') == 1
    route = "/versions/{version}"
    assert live.metric(f'dne_requests_total{{method="GET",route="{route}",status="200"}}') == 1
    assert live.metric("dne_images_total") == 2
    assert live.metric("dne_served_version") == 1
    assert live.metric("dne_swaps_total") == 2
    assert live.metric("dne_following") == 1
    assert live.metric("dne_queue_images") == 0


def test_what_is_not_offered_is_a_problem_too(live: Live) -> None:
    assert_problem(live.http.get("/nowhere"), 404, says="/nowhere")
    answer = live.http.get("/predict")
    assert_problem(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_what_nobody_foresaw_is_500_without_its_insides(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("at /secret/path")

    monkeypatch.setattr(live.serving, "open_store", fail)
    answer = live.http.get("/versions")
    assert_problem(answer, 500)
    assert "secret" not in answer.text
    assert answer.json()["instance"] in caplog.text
    assert "/secret/path" in caplog.text


def test_a_version_whose_parent_was_deleted_is_still_shown(live: Live, store: Store) -> None:
    delete_version(store, 1, actor="tests", reason="no longer needed")
    body = live.http.get("/versions/2").json()
    assert (body["version"], body["parent"]) == (2, 1)
    assert [one["version"] for one in live.http.get("/versions").json()["versions"]] == [2]
