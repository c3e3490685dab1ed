"""Class names as folders spell them, from the command to the store."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from model_store.cli.main import main as store_command
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import write_classes

COMPOSED = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
COOK = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{COOKING}"


def test_two_spellings_of_one_name_are_refused_and_both_folders_are_named(
    dne_train: Command, tmp_path: Path
) -> None:
    data = write_classes(tmp_path / "data", [COMPOSED, DECOMPOSED], images=2)
    assert dne_train.add(data) == 1
    assert "two spellings of one class name" in dne_train.err
    assert "(" + ascii(COMPOSED) + ")" in dne_train.err
    assert "(" + ascii(DECOMPOSED) + ")" in dne_train.err
    assert dne_train.versions == []


def test_a_name_is_kept_composed_and_known_in_either_spelling(
    dne_train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_classes(tmp_path / "data", [DECOMPOSED, COOK, "Digit_0"], images=2)
    write_classes(data, ["digit_0"], images=2, seed=1)
    assert dne_train.add(data, "--json") == 0
    facts = json.loads(dne_train.out)
    assert set(facts["new_classes"]) == {COMPOSED, COOK, "Digit_0", "digit_0"}
    assert len(facts["notes"]) == 1
    assert "note: the classes 'Digit_0' and 'digit_0' differ in case" in dne_train.err
    assert store_command(["show", "1", "--store", str(dne_train.store)]) == 0
    assert COOK in capsys.readouterr().out
    again = write_classes(tmp_path / "again", [DECOMPOSED], images=2)
    assert dne_train.add(again) == 1
    assert "knows 'café' already" in dne_train.err
    assert dne_train("evaluate", "--data", again, "--json") == 0
    assert set(json.loads(dne_train.out)["per_class"]) == {COMPOSED}


def test_a_class_that_an_older_version_spells_otherwise_is_found(
    dne_train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dne_train.add(write_classes(tmp_path / "data", ["a", "b"], images=2)) == 0
    with monkeypatch.context() as before:  # as a version from before names were composed
        before.setattr("model_store.maintenance.edit_classes.new_class_name", lambda name: name)
        rename = ["rename-class", "a", DECOMPOSED, "--store", str(dne_train.store)]
        assert store_command(rename) == 0
    more = write_classes(tmp_path / "more", [COMPOSED], images=3)
    assert dne_train("add-task", "--extend", "--data", more, "--epochs", 1) == 0
    manifest = Store.open(str(dne_train.store)).manifest(3)
    assert (manifest.classes, manifest.extended) == ((DECOMPOSED, "b"), (DECOMPOSED,))
