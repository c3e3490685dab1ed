"""Grow the network for tasks that are there: adapt the first expert, or learn another one.

After a quick version that is done by itself, as far as it is asked for or earns its cost."""

from __future__ import annotations

from dataclasses import replace

from model_store.errors import DataRejected, WrongUsage
from model_store.records.manifest import Manifest
from model_store.worth import ADAPTED, Kind, can_adapt, grown_from, latency_of, worth_of
from trainer.base import Base, base_of
from trainer.data.folders import Listing
from trainer.data.sources.forms import list_judge
from trainer.data.task_data import TaskData, read_again, recall_task_data
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask, Deepen, Growth, Learning, heads_for
from trainer.start.make_student import make_adapting, make_deepening
from trainer.versions.one_version import announced
from trainer.versions.outcome import Outcome


def _adapt_with(
    base: Base,
    *,
    data: TaskData,
    request: Learning,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Adapt the first expert to all images at hand, which are labelled among the base's classes."""
    assert base.parent is not None
    refuse_younger_experts(base.parent)

    with announced(base, request=request, progress=progress, ranks=ranks) as run:
        return run.learn(make_adapting(base, request=request), data)


def refuse_younger_experts(parent: Manifest) -> None:
    if len(parent.experts) > 1:
        raise WrongUsage(
            f"version {parent.version} has an expert that reads the first one, so the first one "
            "cannot change any more; `dne-train deepen --kind dense` adds another expert"
        )


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
        return _deepen_with(base, data=data, request=request, progress=progress, ranks=ranks)
    _refuse_nothing_to_tell_apart(data)
    return _adapt_with(base, data=data, request=request, progress=progress, ranks=ranks)


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


def _deepen_with(
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
    if adapts and ADAPTED in base.parent.tasks[-1].training:
        raise NothingToDeepen(f"no task was added since version {base.parent.version} was adapted")
    grown = grown_from(base.store, base.parent, kind="adapter" if adapts else "dense")
    if grown is not None:
        what = "was adapted to" if adapts else "has an expert for"
        raise NothingToDeepen(
            f"version {grown} {what} these tasks and was not promoted; `dne-store show {grown}` "
            "says why, and deepen without `if_needed` learns another"
        )


def _classes_to_deepen(parent: Manifest) -> tuple[str, ...]:
    names = tuple(name for task in parent.spec.tasks_without_expert for name in task.classes)
    if not names:
        raise NothingToDeepen(
            f"version {parent.version} has no task without an expert; `dne-train add-task --quick` "
            "adds one after a pre-trained start"
        )
    return names


def grow_after(
    outcome: Outcome,
    *,
    data: TaskData,
    request: AddTask,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Learn the next version for the classes of a quick one, if it is asked for or worth it."""
    manifest = outcome.manifest
    unsigned = request.keys.signer is not None and manifest.signature is None
    if unsigned or request.extend or not manifest.spec.is_pretrained:
        return outcome
    gate = manifest.metrics.gate
    by_gate = gate is not None and not gate.passed and not gate.forced
    if outcome.refused and not by_gate:
        return outcome
    base = replace(base_of(request), parent=manifest)
    step = next_step(base, data=data, request=request, progress=progress)
    # New classes may have been refused because the network tells them badly from old ones, and
    # adapting mends that. Beside a version that was refused, no expert is worth its time.
    if step is None or (outcome.refused and step == "expert"):
        return outcome
    grow = _deepen_with if step == "expert" else _adapt_with
    # Labels of the inbox are used by the quick version: the next one is not the first to use them.
    once = replace(request, on_published=None)
    deeper = grow(base, data=data, request=once, progress=progress, ranks=ranks)
    return replace(outcome, deeper=deeper, grew_by_itself=request.growth == "auto")


def next_step(base: Base, *, data: TaskData, request: AddTask, progress: Progress) -> Growth | None:
    """Choose how to grow, and say what could be won where nobody has asked for it."""
    manifest, store = base.parent, base.store
    assert manifest is not None
    assert store is not None
    if request.growth == "expert":
        return "expert" if manifest.spec.tasks_without_expert else None
    if request.growth == "adapt":
        if len(manifest.classes) > 1:
            return "adapt"
        progress.note("with one class there is nothing to tell apart, so nothing is adapted")
        return None
    at_hand = _images_at_hand(manifest, data)
    prospect = worth_of(manifest, at_hand, latency_ms=latency_of(store, manifest))
    if prospect is None:
        return None
    adapts = prospect.kind == "adapter"
    if request.growth == "auto" and adapts and not prospect.lost:
        progress.note(f"{prospect}; version {manifest.version} is there meanwhile")
        return "adapt"
    how = "--grow adapt" if adapts else "dne-train deepen"
    progress.note(f"{prospect}: `{how}` does it")
    return None


def _images_at_hand(manifest: Manifest, data: TaskData) -> dict[str, int]:
    return {name: len(data.for_training.rows_of(name)) for name in manifest.classes}


def taken_up(
    listing: Listing,
    *,
    base: Base,
    request: AddTask,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Outcome | None:
    """Go on where a run was stopped after its quick version; None where there is nothing to go on
    with. The images have to be those of the newest task."""
    parent = base.parent
    if parent is None or request.extend or request.growth == "quick":
        return None
    if not parent.spec.is_pretrained or parent.adapted or parent.deepened:
        return None
    assert base.store is not None
    grown = grown_from(base.store, parent, kind="adapter") or grown_from(
        base.store, parent, kind="dense"
    )
    if grown is not None and not _waits(base.store.manifest(grown), base=base, request=request):
        return None  # one that was grown and refused is not learnt again
    data = _same_images(listing, base=base, request=request, progress=progress)
    if data is None:
        return None
    if grown is not None:
        return _promoted(base.store.manifest(grown), base=base, request=request, progress=progress)
    step = next_step(base, data=data, request=request, progress=progress)
    if step is None:
        return None
    what = "its expert is next" if step == "expert" else "adapting to them is next"
    progress.note(
        f"version {parent.version} has these images as task {parent.tasks[-1].name}; {what}"
    )
    grow = _deepen_with if step == "expert" else _adapt_with
    outcome = grow(base, data=data, request=request, progress=progress, ranks=ranks)
    return replace(outcome, grew_by_itself=request.growth == "auto")


def _waits(grown: Manifest, *, base: Base, request: AddTask) -> bool:
    """Return whether a version passed its gate and was not promoted: its run was killed."""
    assert base.store is not None
    gate = grown.metrics.gate
    passed = gate is None or gate.passed or gate.forced
    history = base.store.history(request.channel)
    return passed and request.promote and all(one.target != grown.version for one in history)


def _promoted(grown: Manifest, *, base: Base, request: AddTask, progress: Progress) -> Outcome:
    """Promote the version that a killed run has published."""
    assert base.store is not None
    progress.note(f"version {grown.version} has these images, and has grown; it is promoted now")
    refused = base.store.channel(request.channel).promote_or_explain(
        grown, head=base.head, actor=request.actor, reason=request.reason
    )
    return Outcome(
        manifest=grown,
        parent=base.parent,
        promoted=refused is None,
        refused=refused,
        served=None if refused else grown.version,
        forecast=None,
        seconds=0.0,
    )


def _same_images(
    listing: Listing, *, base: Base, request: AddTask, progress: Progress
) -> TaskData | None:
    """Read the images again, if they are those of the newest task."""
    assert base.parent is not None
    newest = base.parent.tasks[-1]
    listing = listing.spelt_as(base.parent.spec.classes)
    if "data" not in newest.training or set(listing.names) != set(newest.classes):
        return None
    data = read_again(listing, base=base, request=request, progress=progress)
    return data if newest.training["data"] == data.digest else None
