"""What is said of a version that too few images judge, wherever its verdict is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.cli.main import main as store_command
from tests.trainer.command import Command
from tests.trainer.folders import write_classes


def test_too_few_images_to_judge_by_are_told_in_text_json_store_and_report(
    dne_train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = write_classes(tmp_path / "letters", ["a", "b"])
    assert dne_train.add(letters) == 0
    assert "the gate: not judged: 4 images\n" in dne_train.out
    digits = write_classes(tmp_path / "digits", ["0", "1"])
    assert dne_train.add(digits, "--json") == 0
    assert "the gate will judge by 4 images of new classes and 4 of old ones" in dne_train.err
    few = "not judged: 4 images of new classes and 4 images of old classes"
    facts = json.loads(dne_train.out)
    assert (facts["verdict"], facts["judged"]) == (few, {"old": 4, "new": 4})
    assert facts["gate"]["not_judged"] == ["new", "old"]
    store = ("--store", str(dne_train.store))
    assert store_command(["show", "2", *store]) == 0
    assert few in capsys.readouterr().out
    assert store_command(["show", "2", "--json", *store]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == few
    assert dne_train("report", 2, "--out", tmp_path / "report", "--json") == 0
    assert json.loads(dne_train.out)["verdict"] == few
    assert few in (tmp_path / "report" / "report.html").read_text()


def test_the_power_of_the_evidence_is_told(dne_train: Command, tmp_path: Path) -> None:
    assert dne_train.add(write_classes(tmp_path / "letters", ["a", "b", "c"])) == 0
    assert dne_train.add(write_classes(tmp_path / "digits", ["0", "1"])) == 0
    assert "6 of old ones; they notice a fall of 5 points hardly ever" in dne_train.err
    signs = write_classes(tmp_path / "signs", ["plus", "minus"])
    assert dne_train.add(signs, "--max-drop", 30) == 0
    assert "they notice" not in dne_train.err  # measured at the default limit only


def test_an_extension_is_announced_as_judged_by_images_of_all_classes(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    assert dne_train.add(letters) == 0
    more = write_classes(tmp_path / "more", ["a"], seed=9)
    assert dne_train("add-task", "--data", more, "--extend", "--epochs", 1) == 0
    assert "of all classes" in dne_train.err
    assert "of new classes" not in dne_train.err


def test_min_new_without_evidence_ends_with_3_and_the_way_on(
    dne_train: Command, letters: Path
) -> None:
    assert dne_train.add(letters, "--min-new", "80%", "--json") == 3
    assert "a least accuracy needs 12 of new classes: give more" in dne_train.err
    facts = json.loads(dne_train.out)
    assert not facts["promoted"]
    assert facts["refused"].startswith("the gate refused it: a least accuracy of 80.0 % cannot be")
    assert facts["verdict"].startswith("refused: a least accuracy of 80.0 % cannot be judged by 4")
