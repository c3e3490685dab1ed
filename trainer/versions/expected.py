"""Expect the phases of a run before it begins, with the operations of each."""

from __future__ import annotations

from collections.abc import Iterator

from model_store.network.flops import folded_flops
from trainer.data.sampling import can_be_balanced, epoch_size
from trainer.data.task_data import TaskData
from trainer.learning.growing import ADAPTING, growing_epoch
from trainer.learning.plan import (
    BALANCING,
    EXTENDING,
    LEARNING,
    Plan,
    balanced_epoch,
    learning_epoch,
    tunes,
    tuning_plan,
)
from trainer.learning.student import Student
from trainer.learning.token_reading import READING
from trainer.progress import ExpectedPhase
from trainer.request import Learning
from trainer.versions.finish import CHOOSING, JUDGING, images_to_herd

FORWARD_AND_BACKWARD = 3
"""The passes that a learning step takes of the parts that learn: a backward pass counts as two."""


def expected_phases(
    student: Student, *, data: TaskData, plan: Plan | None, request: Learning
) -> list[ExpectedPhase]:
    """List the phases in which images pass through the network, in their order.

    The shapes tell the operations, so they are known before anything was timed.
    """
    spec = student.network.spec
    forward = folded_flops(spec) / 1e9
    frozen = folded_flops(spec.until(len(student.frozen))) / 1e9 if student.frozen else 0.0
    step = frozen + FORWARD_AND_BACKWARD * (forward - frozen)
    phases: list[ExpectedPhase] = []
    if plan is not None:
        phases += _steps(student, data, plan, loss=request.loss, gflop=step, of_heads=forward)

    def passing(name: str, images: int) -> ExpectedPhase:
        return ExpectedPhase(name=name, images=images, gflop=forward)

    if student.on_pretrained:
        phases.append(passing(READING, len(data.for_training)))
    else:
        phases.append(passing(CHOOSING, images_to_herd(student, data, request)))
    return [*phases, passing(JUDGING, len(data.judged_by))]


def _steps(
    student: Student, data: TaskData, plan: Plan, *, loss: str, gflop: float, of_heads: float
) -> Iterator[ExpectedPhase]:
    """List the phases of learning by steps. Where heads alone learn, images pass forward only."""
    if student.aim == "extension":
        if not can_be_balanced(data.for_training, retired=data.retired):
            return  # it will be refused, with the names of the classes
        images = plan.epochs * epoch_size(balanced_epoch(data))
        yield ExpectedPhase(name=EXTENDING, images=images, gflop=of_heads)
        return
    if student.grows:
        images = plan.epochs * epoch_size(growing_epoch(data.for_training))
        name = ADAPTING if student.aim == "adaptation" else LEARNING
        yield ExpectedPhase(name=name, images=images, gflop=gflop)
        return
    images = plan.epochs * epoch_size(learning_epoch(student, data.for_training))
    yield ExpectedPhase(name=LEARNING, images=images, gflop=gflop)
    if tunes(student, data, loss=loss):
        tuning = tuning_plan(plan, student, data)
        images = tuning.epochs * epoch_size(balanced_epoch(data))
        yield ExpectedPhase(name=BALANCING, images=images, gflop=gflop)
