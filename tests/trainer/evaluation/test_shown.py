"""Which held-out images a report shows, and what is told of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from model_store.records.quality import MAX_SHOWN, JudgedImage
from tests.model_store.drafts import prepare
from tests.trainer.folders import asked, write_classes
from trainer.add_task import add_task
from trainer.evaluation.judged import Judged, choose_shown
from trainer.progress import Silent
from trainer.request import command_of

CLASSES = ("a", "b", "c")


def judged(labels: list[int], answers: list[int], sure: list[float] | None = None) -> Judged:
    logits = np.zeros((len(labels), len(CLASSES)), dtype=np.float32)
    logits[np.arange(len(labels)), answers] = sure or [1.0] * len(labels)
    return Judged(classes=CLASSES, labels_N=np.array(labels, dtype=np.int64), logits_NC=logits)


def pairs(shown: tuple[JudgedImage, ...]) -> list[tuple[str, int, str, str | None]]:
    return [(one.class_name, one.image, one.answer, one.before) for one in shown]


def test_what_got_worse_comes_first_then_better_then_the_rest() -> None:
    labels = [0, 0, 0, 1, 2]
    now = judged(labels, [0, 1, 0, 0, 1])
    before = judged(labels, [0, 0, 1, 2, 0])
    shown = choose_shown(now, before, older=("a", "b"), temperature=1.0)
    assert pairs(shown) == [
        ("a", 1, "b", "a"),  # got worse
        ("a", 2, "a", "b"),  # got better
        ("b", 0, "a", "c"),  # wrong before and now
        ("c", 0, "b", None),  # of a new class, which the parent could not answer
    ]


def test_the_most_certain_ones_are_shown_and_never_more_than_fit() -> None:
    count = 2 * MAX_SHOWN
    sure = [1 + index / 10 for index in range(count)]
    shown = choose_shown(judged([0] * count, [1] * count, sure), None, older=(), temperature=1.0)
    assert [one.image for one in shown] == list(range(count - 1, count - 1 - MAX_SHOWN, -1))


def test_right_answers_are_not_shown_and_no_images_are_no_fault() -> None:
    right = judged([0, 1], [0, 1])
    assert choose_shown(right, right, older=CLASSES, temperature=1.0) == ()
    assert choose_shown(judged([], []), None, older=(), temperature=1.0) == ()


def test_an_image_that_is_not_held_out_cannot_be_shown() -> None:
    draft = prepare(images=0).draft
    shown = (JudgedImage(class_name="class-0a", image=0, answer="class-0b", confidence=1.0),)
    given = {name: getattr(draft, name) for name in type(draft).model_fields}
    metrics = draft.metrics.model_copy(update={"shown": shown})
    with pytest.raises(ValidationError, match="not held out"):
        type(draft).model_validate({**given, "metrics": metrics})


def test_images_outside_the_store_are_not_shown(tmp_path: Path) -> None:
    """All labels of the folder to judge by are wrong, so there is much to show."""
    data = write_classes(tmp_path / "letters", ["a", "b"])
    wrong = write_classes(tmp_path / "wrong", ["b", "a"])
    (wrong / "a").rename(wrong / "other")
    (wrong / "b").rename(wrong / "a")
    (wrong / "other").rename(wrong / "b")
    request = asked(tmp_path / "models", data, val_data=wrong, command="dne-train add-task")
    manifest = add_task(request, progress=Silent()).manifest
    assert manifest.metrics.confusion
    assert manifest.metrics.shown == ()
    assert manifest.metrics.run is not None
    assert manifest.metrics.run.command == "dne-train add-task"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["add-task", "--data", "/data/of-ann/animals/"], "dne-train add-task --data animals"),
        (["add-task", "--data=s3://key:secret@host/cats?x=y"], "dne-train add-task --data=cats"),
        (["deepen", "--store", "s3://b/p", "--seed", "3"], "dne-train deepen --seed 3"),
        (["deepen", "--sto=s3://b/p", "--reason", "for Ann"], "dne-train deepen"),
        (["deepen", "--sign", "/keys/a.pem"], "dne-train deepen"),
        (["add-task", "--name", "two words"], "dne-train add-task --name 'two words'"),
        (["add-task", "--data", r"C:\me\cats"], "dne-train add-task --data cats"),
    ],
)
def test_a_command_is_told_without_places_and_secrets(given: list[str], told: str) -> None:
    assert command_of(given) == told
