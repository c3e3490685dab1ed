"""The advice through the real commands: it comes with a version, and goes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.cli.main import main as dne_store
from model_store.layout import advice_name
from model_store.report.advice import read_advice
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import write_classes
from tests.trainer.vit import made_up, write_vit

HOSTILE = "<b>bold\x1b[31m.png"


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    return write_vit(tmp_path / "vit.safetensors", made_up(image_size=16))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes, with one image of each in the other's folder."""
    folder = write_classes(tmp_path / "data", ["a", "b"], images=20, size=16)
    for here, there in (("a", "b"), ("b", "a")):
        (folder / here / "007.png").rename(folder / there / HOSTILE)
    return folder


def test_advice_is_told_kept_and_deleted_with_its_version(
    dne_train: Command, data: Path, vit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ("--pretrained", vit, "--normalise", "half", "--json")
    assert dne_train("add-task", "--data", data, *start) == 0, dne_train.err
    advice = json.loads(dne_train.out)["advice"]
    wrong = {(one["image"]["name"], one["likelier"]) for one in advice["suspects"][:2]}
    assert wrong == {(repr(f"a/{HOSTILE}"), "b"), (repr(f"b/{HOSTILE}"), "a")}
    assert [one["images"] for one in advice["classes"]] == [16, 16]

    store = Store.open(str(dne_train.store))
    kept = read_advice(store, store.manifest(1))
    assert kept is not None
    assert kept.model_dump(mode="json", by_alias=True) == advice

    assert dne_store(["show", "1", "--advice", "--store", store.location]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.count("is labelled") == len(advice["suspects"])

    assert dne_train("report", 1, "--out", dne_train.store.parent / "report") == 0
    page = (dne_train.store.parent / "report" / "report.html").read_text()
    assert "What would help most" in page
    assert "<b>bold" not in page

    dne_train("add-task", "--data", write_classes(data.parent / "c", ["c"], images=12, size=16))
    assert "what would help most:" in dne_train.out
    assert dne_store(["delete", "1", "--yes", "--reason", "old", "--store", store.location]) == 0
    assert not (dne_train.store / advice_name(1)).exists()
    assert dne_store(["forget", "--class", "b", "--yes", "--store", store.location]) == 0
    assert not (dne_train.store / advice_name(2)).exists()
    capsys.readouterr()
    assert dne_store(["show", "2", "--advice", "--json", "--store", store.location]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 2, "advice": None}
    assert dne_store(["verify", "--store", store.location]) == 0


def test_without_pictures_no_names_are_kept(dne_train: Command, data: Path, vit: Path) -> None:
    start = ("--pretrained", vit, "--normalise", "half", "--memory", "statistics")
    assert dne_train("add-task", "--data", data, *start) == 0, dne_train.err
    assert "more like another class than like their own" in dne_train.out
    assert not (dne_train.store / "advice").exists()


def test_without_a_pretrained_start_the_advice_says_why_it_says_nothing(
    dne_train: Command, letters: Path
) -> None:
    dne_train.add(letters, "--json")
    advice = json.loads(dne_train.out)["advice"]
    assert advice["classes"] == []
    assert "without a pre-trained start" in advice["notes"][0]
