"""Grow the network for tasks that are there: adapt the first expert, or learn another one."""

from __future__ import annotations

from dataclasses import replace

from model_store.errors import DataRejected, WrongUsage
from model_store.records.manifest import Manifest
from trainer.adapt import adapt_with, can_adapt
from trainer.base import Base, base_of
from trainer.data.sources.forms import list_judge
from trainer.data.task_data import TaskData, recall_task_data
from trainer.presets import heads_for
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask, Deepen, Kind
from trainer.start.make_student import make_deepening
from trainer.versions.one_version import announced
from trainer.versions.outcome import Outcome


class NothingToDeepen(WrongUsage):
    """Nothing is to be learnt, or it was learnt before and was not promoted."""


def deepen(request: Deepen, *, progress: Progress, ranks: Ranks = ALONE) -> Outcome:
    """Grow the network for tasks that are there, from the exemplars of their classes.

    The version is promoted if what was grown earns its cost.
    """
    base = base_of(request)
    if base.parent is None:
        # A store that is not there may be a volume that is not mounted: never a quiet end.
        error = NothingToDeepen if base.store else WrongUsage
        raise error(f"there is no version in {request.store} to deepen")
    adapts = _kind(request, base.parent) == "adapter"
    if request.if_needed:
        _refuse_to_repeat(base, adapts=adapts)
    data = recall_task_data(
        base,
        names=() if adapts else _classes_to_deepen(base.parent),
        judge=list_judge(request),
        request=request,
        progress=progress,
    )
    if not adapts:
        return deepen_with(base, data=data, request=request, progress=progress, ranks=ranks)
    _refuse_nothing_to_tell_apart(data)
    return adapt_with(base, data=data, request=request, progress=progress, ranks=ranks)


def _kind(request: Deepen, parent: Manifest) -> Kind:
    if request.kind is not None:
        return request.kind
    return "adapter" if can_adapt(parent) and request.heads is None else "dense"


def _refuse_nothing_to_tell_apart(data: TaskData) -> None:
    images = data.for_training
    if sum(bool(len(images.rows_of(name))) for name in images.classes) < 2:
        raise DataRejected(
            "the store keeps images of fewer than two classes, so there is nothing to tell apart "
            "by an adapted expert; `add-task --grow adapt` adapts it to the images of a new task"
        )


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

    heads = heads_for(images) if asked is None else asked
    with announced(base, request=request, progress=progress, ranks=ranks) as run:
        student = make_deepening(base, heads=heads, request=request)
        return run.learn(student, replace(data, new_images=images))


def _refuse_to_repeat(base: Base, *, adapts: bool) -> None:
    """Raise NothingToDeepen if the parent needs nothing, or if a version has this already. The
    parent is what the channel names, so that version was not promoted, and each further run would
    publish another one."""
    assert base.parent is not None
    assert base.store is not None
    if adapts and "adapted_images" in base.parent.tasks[-1].training:
        raise NothingToDeepen(f"no task was added since version {base.parent.version} was adapted")
    for number in base.store.versions():
        if number <= base.parent.version:
            continue
        found = base.store.manifest(number)
        grown = found.adapted if adapts else bool(found.deepened)
        if grown and found.parent_digest == base.parent.digest:
            what = "was adapted to" if adapts else "has an expert for"
            raise NothingToDeepen(
                f"version {number} {what} these tasks and was not promoted; "
                f"`dne-store show {number}` says why, and deepen without `if_needed` learns another"
            )


def _classes_to_deepen(parent: Manifest) -> tuple[str, ...]:
    names = tuple(name for task in parent.spec.tasks_without_expert for name in task.classes)
    if not names:
        raise NothingToDeepen(
            f"version {parent.version} has no task without an expert; `dne-train add-task --quick` "
            "adds one after a pre-trained start"
        )
    return names
