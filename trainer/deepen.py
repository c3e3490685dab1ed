"""Learn an expert for tasks that were added without one."""

from __future__ import annotations

from dataclasses import replace

from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from trainer.base import Base, base_of
from trainer.data.sources.forms import list_judge
from trainer.data.task_data import TaskData, recall_task_data
from trainer.learning.student import Student
from trainer.presets import heads_for
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask, Deepen
from trainer.start.make_student import make_deepening
from trainer.versions.one_version import learn_version
from trainer.versions.outcome import Outcome


class NothingToDeepen(WrongUsage):
    """No task lacks an expert, or the expert was learnt before and was not promoted."""


def deepen(request: Deepen, *, progress: Progress, ranks: Ranks = ALONE) -> Outcome:
    """Learn one expert for all tasks since the newest expert, from the exemplars of their classes.

    The version is promoted if the expert earns its cost.
    """
    base = base_of(request)
    if base.parent is None:
        # A store that is not there may be a volume that is not mounted: never a quiet end.
        error = NothingToDeepen if base.store else WrongUsage
        raise error(f"there is no version in {request.store} to deepen")
    if request.if_needed:
        _refuse_to_repeat(base)
    data = recall_task_data(
        base,
        names=_classes_to_deepen(base.parent),
        judge=list_judge(request),
        request=request,
        progress=progress,
    )
    return deepen_with(base, data=data, request=request, progress=progress, ranks=ranks)


def deepen_with(
    base: Base,
    *,
    data: TaskData,
    request: AddTask | Deepen,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Learn the expert from these images, which are labelled among the classes of the base."""
    assert base.parent is not None
    names = _classes_to_deepen(base.parent)
    images = sum(len(data.for_training.rows_of(name)) for name in names)
    asked = request.heads if isinstance(request, Deepen) else request.shape.heads

    def prepare() -> tuple[Student, TaskData]:
        student = make_deepening(
            base, heads=heads_for(images) if asked is None else asked, request=request
        )
        return student, replace(data, new_images=images)

    outcome, _ = learn_version(
        base, request=request, progress=progress, prepare=prepare, ranks=ranks
    )
    return outcome


def _refuse_to_repeat(base: Base) -> None:
    """Raise NothingToDeepen if a version has this expert already. The parent is what the channel
    names, so that version was not promoted, and each further run would publish another one."""
    assert base.parent is not None
    assert base.store is not None
    for number in base.store.versions():
        if number <= base.parent.version:
            continue
        found = base.store.manifest(number)
        if found.deepened and found.parent_digest == base.parent.digest:
            raise NothingToDeepen(
                f"version {number} has an expert for these tasks and was not promoted; "
                f"`dne-store show {number}` says why, and deepen without --if-needed learns another"
            )


def _classes_to_deepen(parent: Manifest) -> tuple[str, ...]:
    names = tuple(name for task in parent.spec.tasks_without_expert for name in task.classes)
    if not names:
        raise NothingToDeepen(
            f"version {parent.version} has no task without an expert; `dne-train add-task --quick` "
            "adds one after a pre-trained start"
        )
    return names
