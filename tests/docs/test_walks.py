"""The four walks of docs/architecture.md are the ways that a real datum goes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from model_store.cli.main import main as dne_store
from model_store.store.store import Store
from tests.docs.places import first_missed, followed
from tests.live_server import TOKEN, live_server, png, wait_for
from tests.packaging.project import ROOT
from tests.tiny_versions import promote, publish_tiny
from tests.trainer.folders import SIZES, write_classes
from trainer.cli import main as dne_train
from trainer.request import AddTask, Effort


def walk(title: str) -> list[str]:
    """Read the places of one walk, in their order."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition(f"### {title}\n")[2].partition("\n#")[0]
    places = re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)
    assert len(places) > 5, f"docs/architecture.md has no walk {title!r}"
    return places


def two_versions(location: Path) -> None:
    store = Store.create(str(location))
    first = promote(store, publish_tiny(store))
    promote(store, publish_tiny(store, tasks=[("digits", ("0", "1"))], parent=first))


def test_an_image_passes_the_places_of_its_walk(tmp_path: Path) -> None:
    two_versions(tmp_path / "models")
    with followed(recording=False) as places, live_server(tmp_path / "models") as live:
        live.wait_until_ready()
        places.recording = True
        assert live.predict(png()).status_code == 200
        places.recording = False
    assert first_missed(walk("An image through `POST /predict`"), places.passed) is None


def test_a_folder_passes_the_places_of_its_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluation.forecast.MOST_RUNS", 7)
    folder = write_classes(tmp_path / "letters", ["a", "b"])
    options = ["--data", str(folder), "--epochs", "1", "--augment", "none", *SIZES]
    with followed() as places:
        assert dne_train(["add-task", *options, "--store", str(tmp_path / "models")]) == 0
    assert first_missed(walk("A folder through `dne-train add-task`"), places.passed) is None


def test_a_picture_passes_the_places_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluation.forecast.MOST_RUNS", 7)
    monkeypatch.setattr(
        "trainer.loop.worker.AddTask", partial(AddTask, effort=Effort(epochs=1), augment="light")
    )
    location = str(tmp_path / "models")
    folder = write_classes(tmp_path / "letters", ["a", "b"])
    quickly = ["--epochs", "1", "--augment", "none", *SIZES]
    assert dne_train(["add-task", "--data", str(folder), *quickly, "--store", location]) == 0
    server = live_server(location, collect="sample=100%", poll_seconds=3600)
    with followed(recording=False) as places, server as live:
        live.wait_until_serving(1)
        live.http.headers["Authorization"] = f"Bearer {TOKEN}"
        places.recording = True
        assert live.predict(*map(png, range(4))).status_code == 200
        wait_for(lambda: len(live.http.get("/inbox").json()["items"]) == 4)
        for item in live.http.get("/inbox").json()["items"]:
            assert live.admin(f"/inbox/{item['id']}/label", label="zebra").status_code == 200
        assert live.admin("/jobs").status_code == 200
        assert dne_train(["worker", "--once", "--store", location]) == 0
        live.serving.reloader.poll()
        live.wait_until_serving(2)
        places.recording = False
    assert first_missed(walk("A picture through the loop"), places.passed) is None


def test_a_rollback_passes_the_places_of_its_walk(tmp_path: Path) -> None:
    location = str(tmp_path / "models")
    two_versions(tmp_path / "models")
    with followed(recording=False) as places, live_server(location) as live:
        live.wait_until_serving(2)
        places.recording = True
        assert dne_store(["rollback", "--store", location]) == 0
        live.wait_until_serving(1)
        places.recording = False
    assert first_missed(walk("A rollback to the swap"), places.passed) is None


def test_a_place_out_of_its_order_is_noticed() -> None:
    assert first_missed(["a", "b"], ["x", "a", "a", "b"]) is None
    assert first_missed(["b", "a"], ["x", "a", "a", "b"]) == "a"
