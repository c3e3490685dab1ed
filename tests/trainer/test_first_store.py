"""A first task that comes to nothing leaves no store behind, and touches nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import DneError
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.folders import write_classes


def fail(error: BaseException) -> object:
    def failing(*_: object, **__: object) -> None:
        raise error

    return failing


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DneError("memory ran out"), MemoryError()])
def test_a_first_task_that_fails_while_it_learns_leaves_no_store(
    dne_train: Command,
    letters: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    dne_train.store = tmp_path / "new" / "folder" / "models"
    monkeypatch.setattr("trainer.versions.one_version.learn", fail(error))
    if isinstance(error, MemoryError):  # a fault of ours keeps its traceback
        with pytest.raises(MemoryError):
            dne_train.add(letters)
    else:
        assert dne_train.add(letters) == 1
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert dne_train.add(letters) == 0
    assert dne_train.versions == [1]


def test_a_first_task_of_bad_images_leaves_what_was_there(
    dne_train: Command, tmp_path: Path
) -> None:
    dne_train.store.mkdir()
    (dne_train.store / "notes.txt").write_text("mine")
    bad = write_classes(tmp_path / "bad", ["a", "b"], images=1)
    assert dne_train.add(bad) == 1
    assert [path.name for path in dne_train.store.rglob("*")] == ["notes.txt"]


def test_a_place_where_no_store_can_be_made_is_refused_before_learning(
    dne_train: Command, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model_store.backends.local._link", full)
    assert dne_train.add(letters) == 1
    assert "No space left on device" in dne_train.err
    assert "learning" not in dne_train.err
    assert not dne_train.store.exists()


def test_an_interrupted_first_task_goes_on_although_there_is_no_store_yet(
    dne_train: Command, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.learning.checkpoint.SECONDS_BETWEEN", 0.0)
    kept = ("--epochs", 3, "--checkpoint", tmp_path / "kept")
    with monkeypatch.context() as stopping:
        stopping.setattr("trainer.versions.one_version.draft_version", fail(KeyboardInterrupt()))
        assert dne_train.add(letters, *kept) == 1
    assert "the same command goes on after" in dne_train.err
    assert not dne_train.store.exists()
    assert dne_train.add(letters, *kept) == 0
    assert "going on" in dne_train.err
    assert Store.open(str(dne_train.store)).versions() == [1]
