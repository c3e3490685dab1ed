"""Choose the images of the epochs of learning and of balanced tuning, and count them."""

from __future__ import annotations

from trainer.data.folders import LabelledImages
from trainer.data.sampling import (
    DrawEpoch,
    balanced,
    can_be_balanced,
    epoch_size,
    evened,
    side_by_side,
)
from trainer.data.task_data import TaskData
from trainer.learning.plan import PRETRAINED_TUNING_SHARE, TUNING_SHARE, Plan
from trainer.learning.student import Student

LEARNING, BALANCING, EXTENDING = "learning", "balancing", "extending"
"""The phases of learning by steps."""


def learning_epoch(student: Student, images: LabelledImages) -> DrawEpoch:
    """Draw new images beside old ones."""
    draw = side_by_side if student.on_pretrained else evened
    return draw(images, among=student.new_classes)


def balanced_epoch(data: TaskData, *, most: int | None = None) -> DrawEpoch:
    """Draw equal shares of all classes."""
    return balanced(data.for_training, retired=data.retired, most=most)


def tuning_epoch(student: Student, data: TaskData) -> DrawEpoch:
    # On a pre-trained start, as long as an epoch of learning, however many classes there are.
    return balanced_epoch(data, most=2 * data.new_images if student.on_pretrained else None)


def tunes(student: Student, data: TaskData) -> bool:
    """Tell whether balanced tuning follows learning."""
    return student.teacher is not None and can_be_balanced(data.for_training, retired=data.retired)


def tuning_plan(plan: Plan, student: Student, data: TaskData) -> Plan:
    return plan.for_tuning(
        share=PRETRAINED_TUNING_SHARE if student.on_pretrained else TUNING_SHARE,
        learnt=epoch_size(learning_epoch(student, data.for_training)),
        balanced=epoch_size(tuning_epoch(student, data)),
    )
