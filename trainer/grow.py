"""Grow the network after a quick version, as far as was asked for or as far as it earns."""

from __future__ import annotations

from dataclasses import replace

from model_store.records.manifest import Manifest
from model_store.tables import counted
from trainer.adapt import adapt_with, can_adapt
from trainer.base import Base, base_of
from trainer.data.folders import Listing
from trainer.data.task_data import TaskData, read_again
from trainer.deepen import deepen_with
from trainer.growth.worth import FEWEST_IMAGES, Worth, worth_growing
from trainer.learning.adapting import adapting_passes
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask, Growth
from trainer.versions.outcome import Outcome

FORWARD_AND_BACKWARD = 2.0
"""The time of a pass that learns, for each millisecond of an image alone: batches are faster."""


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
    step = next_step(manifest, data=data, request=request, progress=progress)
    # New classes may have been refused because the network tells them badly from old ones, and
    # adapting mends that. Beside a version that was refused, no expert is worth its time.
    if step is None or (outcome.refused and step == "expert"):
        return outcome
    base = replace(base_of(request), parent=manifest)
    grow = deepen_with if step == "expert" else adapt_with
    # Labels of the inbox are used by the quick version: the next one is not the first to use them.
    once = replace(request, on_published=None)
    deeper = grow(base, data=data, request=once, progress=progress, ranks=ranks)
    return replace(outcome, deeper=deeper, grew_by_itself=request.growth == "auto")


def next_step(
    manifest: Manifest, *, data: TaskData, request: AddTask, progress: Progress
) -> Growth | None:
    """Choose how to grow, and say what could be won where nobody has asked for it."""
    if request.growth == "expert":
        return "expert" if manifest.spec.tasks_without_expert else None
    if request.growth == "adapt":
        if len(manifest.classes) > 1:
            return "adapt"
        progress.note("with one class there is nothing to tell apart, so nothing is adapted")
        return None
    prospect = prospect_of(manifest, data)
    if prospect is None:
        return None
    said = f"{prospect}{_expected(manifest, data)}"
    lost = classes_without_images(manifest, data)
    if lost:
        said += (
            f", at the cost of {counted(lost, 'class', 'classes')} of which the store keeps fewer "
            f"than {FEWEST_IMAGES} images"
        )
    elif request.growth == "auto" and can_adapt(manifest):
        progress.note(f"{said}; version {manifest.version} is there meanwhile")
        return "adapt"
    how = "--grow adapt" if can_adapt(manifest) else "dne-train deepen"
    progress.note(f"{said}: `{how}` does it")
    return None


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
    if parent is None or request.extend or request.growth == "quick" or not _may_grow(base):
        return None
    data = _same_images(listing, base=base, request=request, progress=progress)
    if data is None:
        return None
    step = next_step(parent, data=data, request=request, progress=progress)
    if step is None:
        return None
    what = "its expert is next" if step == "expert" else "adapting to them is next"
    progress.note(
        f"version {parent.version} has these images as task {parent.tasks[-1].name}; {what}"
    )
    grow = deepen_with if step == "expert" else adapt_with
    outcome = grow(base, data=data, request=request, progress=progress, ranks=ranks)
    return replace(outcome, grew_by_itself=request.growth == "auto")


def _may_grow(base: Base) -> bool:
    """Tell whether the version is a quick one from which none was grown. One that was grown and
    not promoted is not learnt again."""
    parent, store = base.parent, base.store
    assert parent is not None
    assert store is not None
    if not parent.spec.is_pretrained or parent.adapted or parent.deepened:
        return False
    later = (store.manifest(number) for number in store.versions() if number > parent.version)
    return not any(one.adapted and one.parent_digest == parent.digest for one in later)


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


def prospect_of(manifest: Manifest, data: TaskData) -> Worth | None:
    """Tell whether growing is worth its time, by the figures of the newest task."""
    classes = len(manifest.classes)
    return worth_growing(
        manifest.tasks[-1].training, images=len(data.for_training), classes=classes
    )


def classes_without_images(manifest: Manifest, data: TaskData) -> int:
    """Count the classes with too few images at hand to tell whether an adaptation harms them."""
    images = data.for_training
    return sum(len(images.rows_of(name)) < FEWEST_IMAGES for name in manifest.classes)


def _expected(manifest: Manifest, data: TaskData) -> str:
    """Say how long adapting takes, where an image was timed."""
    run = manifest.metrics.run
    if run is None or run.latency_ms is None:
        return ""
    passes = adapting_passes(len(data.for_training))
    seconds = passes * FORWARD_AND_BACKWARD * run.latency_ms / 1000
    return f", in about {max(1, round(seconds / 60))} min"
