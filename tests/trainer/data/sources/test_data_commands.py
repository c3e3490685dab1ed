"""`dne-train` on data in other forms than a folder a class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_store.errors import Interrupted
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.data.sources.forms import coco_of, csv_of, flattened, tarred, zipped
from tests.trainer.folders import Listening, asked, write_classes
from trainer.add_task import add_task
from trainer.request import Effort


@pytest.fixture
def dne_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "models", capsys)


@pytest.mark.long
def test_a_zip_a_csv_and_coco_go_through_the_commands(dne_train: Command, tmp_path: Path) -> None:
    letters = write_classes(tmp_path / "in" / "letters", ["a", "b"])
    digits = write_classes(tmp_path / "in" / "digits", ["0", "1"])
    packed = zipped(letters, tmp_path / "letters.zip", inside="letters/")
    assert dne_train.add(packed, "--preset", "tiny") == 0
    table = csv_of(digits, tmp_path / "in" / "digits.csv")
    assert dne_train.add(table, "--preset", "tiny", "--max-drop", 100, "--force") == 0
    tasks = Store.open(str(dne_train.store)).manifest(2).tasks
    assert [(task.name, task.classes) for task in tasks] == [
        ("letters", ("a", "b")),
        ("digits", ("0", "1")),
    ]
    labels = flattened(letters, tmp_path / "coco") | flattened(digits, tmp_path / "coco-2")
    for name in labels:
        if not (tmp_path / "coco" / name).exists():
            (tmp_path / "coco-2" / name).rename(tmp_path / "coco" / name)
    (tmp_path / "coco" / "all.json").write_text(json.dumps(coco_of(labels)))
    strange = tarred(
        write_classes(tmp_path / "in" / "strange", ["x"], images=4), tmp_path / "strange.tar.gz"
    )
    given = ("--data", tmp_path / "coco" / "all.json", "--unknown-data", strange, "--json")
    assert dne_train("evaluate", *given) == 0
    report = json.loads(dne_train.out)
    assert report["images"] == 48
    assert report["unknown"]["auroc"] is not None
    assert (
        dne_train.add(zipped(letters, tmp_path / "more.zip"), "--preset", "tiny", "--extend") == 1
    )
    assert "given all of these images already" in dne_train.err


def test_a_bad_row_is_said_before_anything_is_learnt(dne_train: Command, tmp_path: Path) -> None:
    table = csv_of(write_classes(tmp_path / "in", ["a", "b"]), tmp_path / "photos.csv")
    table.write_text(table.read_text() + "../secret.png,a\nin/a/999.png,a\n")
    assert dne_train.add(table) == 1
    assert "has 2 bad rows, and nothing of it is read: row 26 (../secret.png)" in dne_train.err
    assert dne_train.versions == []


def test_the_part_to_judge_by_leaves_old_classes_to_their_held_out_images(tmp_path: Path) -> None:
    store = tmp_path / "models"
    add_task(asked(store, write_classes(tmp_path / "letters", ["a", "b"])), progress=Listening())
    write_classes(tmp_path / "digits" / "train", ["0", "1"])
    write_classes(tmp_path / "digits" / "val", ["0", "1"], images=9, seed=5)
    progress = Listening()
    outcome = add_task(asked(store, tmp_path / "digits"), progress=progress)
    gate = outcome.manifest.metrics.gate
    assert outcome.manifest.metrics.source == "validation"
    assert gate is not None
    assert (gate.old_images, gate.new_images) == (4, 18)
    assert any("learning from train, judging by val" in note for note in progress.notes)
    assert not any("will not be judged" in note for note in progress.notes)


def test_a_run_on_a_folder_goes_on_from_its_zip(tmp_path: Path) -> None:
    """A run is known by its images: the same images in another form are the same run."""
    letters = write_classes(tmp_path / "letters", ["a", "b"])
    options = {"checkpoint": tmp_path / "kept", "effort": Effort(epochs=4, batch_size=20)}
    with pytest.raises(Interrupted):
        add_task(
            asked(tmp_path / "models", letters, **options),
            progress=Listening(interrupt_in="learning", after=2),
        )
    progress = Listening()
    packed = zipped(letters, tmp_path / "letters.zip")
    add_task(asked(tmp_path / "models", packed, **options), progress=progress)
    assert any("going on" in note for note in progress.notes)
