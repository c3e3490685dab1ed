"""Groups above the classes, from a file or from folders, into a version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from model_store.errors import DataRejected, WrongUsage
from model_store.records.hierarchy import Hierarchy
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import write_classes
from trainer.data.hierarchy import list_nested, read_parents
from trainer.evaluation.evaluate import measure_levels
from trainer.evaluation.judged import Judged


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    return path


def test_a_file_names_the_group_of_each_name(tmp_path: Path) -> None:
    path = written(tmp_path, "puma: cat\ncat: mammal\n")
    assert read_parents(path) == {"puma": "cat", "cat": "mammal"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no lines such as"),
        ("- puma\n", "has no lines such as"),
        ("puma: [cat]\n", "the line of 'puma' is not a name"),
        ("no: country\n", "put names that look like numbers"),
        ("1: number\n", "the line of '1' is not a name"),
        ("a: [b\n", "the line of 'a' is not a name"),
        ("a: b\n c: d\n", "is not YAML"),
        ("a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "the line of 'a' is not a name"),
        ("!!python/object/apply:os.system ['true']\n", "has no lines such as"),
        ("a: !!python/object/apply:os.system ['true']\n", "the line of 'a' is not a name"),
        ("a: !!binary aGVs\n", "the line of 'a' is not a name"),
        ("a: 2001-13-45\n", "the line of 'a' is not a name"),
        (f"a: {'9' * 5000}\n", "the line of 'a' is not a name"),
        (f"? {'9' * 5000}\n: a\n", "put names that look like numbers"),
        ("a: &x b\nc: *x\n", "the line of 'c' is not a name"),
        ("<<: {a: b}\n", "the line of '<<' is not a name"),
        ("? [a]\n: b\n", "a line is not a name"),
        ("a: " + "[" * 5000, "the line of 'a' is not a name"),
        ("a:\n" + "".join(" " * n + "- \n" for n in range(1, 900)), "the line of 'a'"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(DataRejected, match=reason):
        read_parents(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match=r"nowhere\.yaml` cannot be read"):
        read_parents(tmp_path / "nowhere.yaml")


def test_folders_in_folders_are_groups(tmp_path: Path) -> None:
    write_classes(tmp_path / "all" / "animals" / "cats", ["puma", "lynx"])
    write_classes(tmp_path / "all" / "animals", ["eagle"])
    write_classes(tmp_path / "all", ["rock"])
    listing, parents = list_nested(tmp_path / "all")
    assert sorted(listing.names) == ["eagle", "lynx", "puma", "rock"]
    assert parents == {
        "puma": "cats",
        "lynx": "cats",
        "cats": "animals",
        "eagle": "animals",
    }
    assert listing.images == 4 * 12


def test_a_folder_is_a_class_or_a_group(tmp_path: Path) -> None:
    write_classes(tmp_path / "all", ["cats"])
    write_classes(tmp_path / "all" / "cats", ["puma"])
    with pytest.raises(DataRejected, match="cats has images and folders"):
        list_nested(tmp_path / "all")


def test_one_name_in_two_groups_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "all" / "cars", ["small"])
    write_classes(tmp_path / "all" / "dogs", ["small"])
    with pytest.raises(DataRejected, match="'small' is in 'cars' and in 'dogs'"):
        list_nested(tmp_path / "all")


def test_a_version_has_its_groups_and_hands_them_on(
    dne_train: Command, letters: Path, digits: Path, tmp_path: Path
) -> None:
    assert dne_train.add(letters, "--hierarchy", written(tmp_path, "a: letter\nb: letter\n")) == 0
    assert dne_train.add(digits, "--max-drop", 100) in (0, 3)
    store = Store.open(str(dne_train.store))
    for version in (1, 2):
        hierarchy = store.manifest(version).hierarchy
        assert hierarchy is not None
        assert hierarchy.parents == {"a": "letter", "b": "letter"}


def test_folders_become_a_version(dne_train: Command, tmp_path: Path) -> None:
    write_classes(tmp_path / "all" / "low", ["a", "b"])
    write_classes(tmp_path / "all" / "high", ["A"])
    assert dne_train.add(tmp_path / "all", "--hierarchy", "folders") == 0
    manifest = Store.open(str(dne_train.store)).manifest(1)
    assert manifest.hierarchy is not None
    assert manifest.hierarchy.parents == {"a": "low", "b": "low", "A": "high"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: letter\nzebra: animal\n", "'zebra' is neither a class nor a group of classes"),
        ("a: letter\nletter: a\n", "form a cycle"),
        ("a: b\n", "'b' is a class, and cannot be a group"),
    ],
)
def test_a_hierarchy_that_does_not_fit_the_classes_is_refused_before_learning(
    dne_train: Command, letters: Path, tmp_path: Path, text: str, reason: str
) -> None:
    assert dne_train.add(letters, "--hierarchy", written(tmp_path, text)) == 1
    assert reason in dne_train.err
    assert dne_train.versions == []


def test_evaluation_and_report_count_the_answers_of_groups(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    parents = written(tmp_path, "a: letter\nb: letter\n")
    assert dne_train.add(letters, "--hierarchy", parents) == 0
    assert dne_train("evaluate", "--data", letters, "--json") == 0
    levels = json.loads(dne_train.out)["levels"]
    assert levels["right_at_any_level"] >= levels["answered_by_groups"]
    assert dne_train("evaluate", "--data", letters) == 0
    assert "right at any level" in dne_train.out
    assert dne_train("report", 1, "--out", tmp_path / "report") == 0
    assert "answered by a group" in (tmp_path / "report" / "report.html").read_text()


def test_the_answers_of_groups_are_counted_as_a_server_gives_them() -> None:
    judged = Judged(
        classes=("puma", "lynx", "wolf"),
        labels_N=np.array([0, 0, 2, 1]),
        logits_NC=np.log(
            np.array([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.4, 0.4, 0.2], [0.3, 0.2, 0.5]])
        ).astype(np.float32),
    )
    cats = Hierarchy(parents={"puma": "cat", "lynx": "cat"})
    assert measure_levels(judged, cats, temperature=1.0) == {
        "answered_by_groups": 0.5,
        "right_of_these": 0.5,
        "right_at_any_level": 0.5,
    }
    assert measure_levels(judged, None, temperature=1.0) is None
