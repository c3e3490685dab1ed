"""Every command that reads a store, on every version that the real commands made."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from model_store.cli.main import main as dne_store
from model_store.codec import load_network
from model_store.preprocess import normalise
from model_store.store.store import Store
from tests.live_server import live_server
from tests.trained_store import EXTENDED, NEW_NAME, RENAMED, RETIRED, SIZE, TrainedStore
from trainer.cli import main as dne_train

Main = Callable[[list[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Both commands on one store, as a person and as a script would call them."""

    location: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, main: Main, *arguments: object) -> dict[str, Any]:
        """Asks for text, then for JSON: both must succeed."""
        self.text(main, *arguments)
        return self.json(main, *arguments)

    def text(self, main: Main, *arguments: object) -> str:
        assert main([*map(str, arguments), "--store", str(self.location)]) == 0
        printed = self.capsys.readouterr()
        assert printed.out.strip(), printed.err
        assert "Traceback" not in printed.err
        return printed.out

    def json(self, main: Main, *arguments: object) -> dict[str, Any]:
        assert main([*map(str, arguments), "--store", str(self.location), "--json"]) == 0
        found: dict[str, Any] = json.loads(self.capsys.readouterr().out.splitlines()[-1])
        return found

    @property
    def store(self) -> Store:
        return Store.open(str(self.location))

    @property
    def versions(self) -> list[int]:
        return self.store.versions()


@pytest.fixture(params=["tiny", "pretrained"])
def asking(
    request: pytest.FixtureRequest,
    trained_store: TrainedStore,
    capsys: pytest.CaptureFixture[str],
) -> Asking:
    tiny = request.param == "tiny"
    location = trained_store.location if tiny else trained_store.pretrained
    return Asking(location=location, capsys=capsys)


@pytest.fixture
def changing(trained_copy: TrainedStore, capsys: pytest.CaptureFixture[str]) -> Asking:
    """On a store of its own."""
    return Asking(location=trained_copy.location, capsys=capsys)


def test_list_names_every_version_and_what_is_served(asking: Asking) -> None:
    found = asking(dne_store, "list")
    assert [row["version"] for row in found["versions"]] == asking.versions
    assert found["problems"] == []
    head = asking.store.head("production")
    assert head is not None
    assert found["channels"]["production"]["target"] == head.target


def test_show_tells_everything_about_every_version(asking: Asking) -> None:
    for version in asking.versions:
        found = asking(dne_store, "show", version)
        manifest = asking.store.manifest(version)
        assert found["metrics"] == manifest.metrics.model_dump(mode="json", by_alias=True)
        assert found["classes"] == list(manifest.classes)


def test_diff_is_told_between_all_neighbours_in_both_directions(asking: Asking) -> None:
    for old, new in pairwise(asking.versions):
        there, back = asking(dne_store, "diff", old, new), asking(dne_store, "diff", new, old)
        assert there["classes"]["added"] == back["classes"]["removed"]
        assert there["added_bytes"] == back["removed_bytes"]


def test_diff_names_a_renamed_and_a_retired_class(
    trained_store: TrainedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = Asking(location=trained_store.location, capsys=capsys)
    renamed = asking(dne_store, "diff", trained_store.third, trained_store.renaming)
    assert renamed["classes"] == {"added": [NEW_NAME], "removed": [RENAMED]}
    retired = asking(dne_store, "diff", trained_store.extension, trained_store.retirement)
    assert retired["classes"] == {"added": [], "removed": [RETIRED]}


def test_every_byte_of_every_version_is_verified(asking: Asking) -> None:
    asking(dne_store, "verify")
    for version in asking.versions:
        asking(dne_store, "verify", version)


def test_storage_counts_every_version_and_nothing_is_garbage(asking: Asking) -> None:
    found = asking(dne_store, "storage")
    assert [one["version"] for one in found["versions"]] == asking.versions
    assert found["unnamed"] == 0
    collected = asking(dne_store, "gc")
    assert (collected["condemned"], collected["deleted"]) == ([], [])


def test_a_copy_has_every_version_and_the_whole_history(asking: Asking, tmp_path: Path) -> None:
    there = Asking(location=tmp_path / "there", capsys=asking.capsys)
    asking(dne_store, "copy", "--to", there.location)
    there.text(dne_store, "verify")
    assert there.store.history("production") == asking.store.history("production")
    assert [there.store.manifest(one) for one in there.versions] == [
        asking.store.manifest(one) for one in asking.versions
    ]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_version_is_written_as_onnx_and_answers_alike(
    asking: Asking, trained_store: TrainedStore, tmp_path: Path, precision: str
) -> None:
    pixels = Image.open(io.BytesIO(trained_store.image(EXTENDED)))
    for version in asking.versions if precision == "fp32" else asking.versions[-1:]:
        asking.json(dne_store, "export-onnx", version, "--out", tmp_path, "--precision", precision)
        manifest = asking.store.manifest(version)
        images = normalise(np.asarray(pixels)[None], manifest.preprocessing)
        assert images.shape[-2:] == (SIZE, SIZE)
        (file,) = tmp_path.glob(f"version-{version:08}*.onnx")
        (logits,) = onnxruntime.InferenceSession(str(file)).run(["logits"], {"images": images})
        with torch.no_grad():
            every = load_network(asking.store.read_shard, manifest)(torch.from_numpy(images))
        expected = every[:, list(manifest.places)]  # retired classes are not written
        assert logits.shape == expected.shape
        limit = 1e-3 if precision == "fp32" else 0.2 * float(expected.abs().max())
        assert float(np.abs(logits - expected.numpy()).max()) < limit


def test_a_report_is_written_of_every_version(asking: Asking, tmp_path: Path) -> None:
    for version in asking.versions:
        out = tmp_path / str(version)
        found = asking.json(dne_train, "report", version, "--out", out)
        metrics = asking.store.manifest(version).metrics
        assert found["accuracy"]["all"] == pytest.approx(metrics.accuracy.all)
        assert json.loads((out / "report.json").read_text())["version"] == version
        assert "</html>" in (out / "report.html").read_text()


def test_every_version_is_evaluated_on_a_task_that_it_knows(
    asking: Asking, trained_store: TrainedStore
) -> None:
    for version in asking.versions:
        data = trained_store.data("letters" if version == 1 else "digits")
        found = asking.json(dne_train, "evaluate", "--data", data, "--version", version)
        assert set(found["per_class"]) == {folder.name for folder in data.iterdir()}


def test_the_served_version_is_evaluated_and_reported_in_words(
    asking: Asking, trained_store: TrainedStore, tmp_path: Path
) -> None:
    digits, greek = trained_store.data("digits"), trained_store.data("greek")
    told = asking.text(dne_train, "evaluate", "--data", digits, "--unknown-data", greek)
    assert "100.0 %" in told
    newest = asking.versions[-1]
    told = asking.text(dne_train, "report", newest, "--out", tmp_path)
    assert f"version {newest}, judged by" in told
    told = asking.text(dne_store, "export-onnx", newest, "--out", tmp_path)
    assert f"{newest}" in told


def test_a_deleted_refusal_leaves_a_store_that_is_whole_and_served(
    changing: Asking, trained_copy: TrainedStore
) -> None:
    changing.text(dne_store, "delete", trained_copy.refused)
    swept = [changing.json(dne_store, "gc", "--sweep", "--grace", 0) for _ in range(2)]
    assert sum(one["deleted_bytes"] for one in swept) > 0
    changing(dne_store, "verify")
    with live_server(changing.location) as live:
        live.wait_until_ready()
        for version in changing.versions:
            assert live.http.get(f"/versions/{version}").status_code == 200
            answer = live.predict(trained_copy.image("0"), query=f"?version={version}")
            assert answer.json()["version"] == version
        assert live.http.get(f"/versions/{trained_copy.refused}").status_code in (404, 410)


def test_a_forgotten_class_leaves_every_version_readable(
    changing: Asking, trained_copy: TrainedStore, tmp_path: Path
) -> None:
    changing.text(dne_store, "forget", "--class", EXTENDED)
    changing(dne_store, "verify")
    for version in (trained_copy.first, trained_copy.refused, trained_copy.served):
        found = changing.json(dne_train, "report", version, "--out", tmp_path / str(version))
        assert found["version"] == version
        changing(dne_store, "show", version)


def test_the_channel_goes_back_and_on_over_every_version(changing: Asking) -> None:
    for version in changing.versions:
        changing.text(dne_store, "promote", version)
    for version in reversed(changing.versions[:-1]):
        assert changing.json(dne_store, "rollback")["target"] == version
    assert changing.json(dne_store, "resume")["target"] == changing.versions[-1]
