"""Learn one task, from a folder of images to a version that is promoted.

After a pre-trained start a task is learnt at two speeds: first a version whose delta is a
classifier, within seconds, and then, if it is asked for or earns it, a version that has grown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from model_store.errors import WrongUsage
from model_store.loop.corrections import ImageMove, classes_moved
from model_store.names import notes_on_look_alikes
from model_store.records.hierarchy import Hierarchy
from trainer.base import Base, base_of
from trainer.data.checks import (
    refuse_known_classes,
    refuse_nested,
    refuse_new_classes,
    refuse_retired_classes,
)
from trainer.data.folders import Listing, note_ignored
from trainer.data.hierarchy import FOLDERS, merged, read_parents
from trainer.data.sources.forms import list_data
from trainer.data.task_data import corrected_task_data, read_task_data
from trainer.grow import grow_after, refuse_younger_experts, taken_up
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask
from trainer.start.first_network import refuse_pretrained
from trainer.start.make_student import make_correcting, make_student
from trainer.versions.one_version import announced
from trainer.versions.outcome import Outcome


def add_task(
    request: AddTask,
    *,
    progress: Progress,
    ranks: Ranks = ALONE,
    listing: Listing | None = None,
) -> Outcome:
    """Train, judge and publish a version, and promote it if the gate lets it pass.

    Read the images of `listing`, if it is given, and not those of the request's data.
    """
    started = time.monotonic()
    listing, parents = _listed(request) if listing is None else (listing, _groups(request))
    note_ignored(listing, progress)
    base = base_of(request)
    _refuse_speed(base, request)
    _refuse_memory(base, request)
    again = taken_up(listing, base=base, request=request, progress=progress, ranks=ranks)
    if again is not None:
        return again
    listing = _checked(listing, base, request)
    notes = _say_look_alikes(listing, base, progress)
    hierarchy = _with_groups(base, parents, listing)
    with announced(base, request=request, progress=progress, ranks=ranks) as run:
        student = make_student(base, request=request, new=listing, progress=progress)
        data = read_task_data(
            listing,
            base=base,
            request=request,
            classes=student.network.spec.classes,
            preprocessing=student.preprocessing,
            progress=progress,
            hierarchy=hierarchy,
        )
        outcome = run.learn(student, data)
    outcome = replace(outcome, notes=notes, seconds=time.monotonic() - started)
    return grow_after(outcome, data=data, request=request, progress=progress, ranks=ranks)


def correct_images(request: AddTask, moves: Sequence[ImageMove], *, progress: Progress) -> Outcome:
    """Publish a version whose classifier is fitted with kept images in their right classes, or
    without them, and promote it if the gate lets it pass."""
    base = base_of(request)
    names = classes_moved(moves)
    with announced(base, request=request, progress=progress) as run:
        data = corrected_task_data(base, moves, request=request, progress=progress)
        changed = tuple(name for name in data.for_training.classes if name in names)
        student = make_correcting(base, request=request, classes=changed)
        return run.learn(student, data)


def _with_groups(base: Base, parents: Mapping[str, str], listing: Listing) -> Hierarchy | None:
    before = base.parent.hierarchy if base.parent else None
    known = base.parent.spec.classes if base.parent else ()
    return merged(before, parents, classes=(*known, *listing.names))


def _on_pretrained(base: Base, request: AddTask) -> bool:
    if base.parent is not None:
        return base.parent.spec.is_pretrained
    return request.pretrained is not None


def _refuse_memory(base: Base, request: AddTask) -> None:
    if not request.keeps_pictures and not _on_pretrained(base, request):
        raise WrongUsage(
            "`memory=statistics` is for a model with a pre-trained start: without one a new expert "
            "needs pictures of old classes; `memory=0` keeps no exemplars"
        )


def _listed(request: AddTask) -> tuple[Listing, Mapping[str, str]]:
    """List the classes of the data, and the groups that come with them."""
    listing = list_data(request)
    if request.hierarchy == FOLDERS:
        return listing, listing.parents
    refuse_nested(listing)
    return listing, _groups(request)


def _groups(request: AddTask) -> Mapping[str, str]:
    return read_parents(Path(request.hierarchy)) if request.hierarchy else {}


def _refuse_speed(base: Base, request: AddTask) -> None:
    if request.quick is None and request.grow in (None, "auto"):
        return
    if not _on_pretrained(base, request):
        setting = f"quick={request.quick}" if request.quick is not None else f"grow={request.grow}"
        raise WrongUsage(
            f"`{setting}` is for a model with a pre-trained start: without one the "
            "expert is what knows the new classes, and every task has one"
        )
    if request.growth == "adapt" and base.parent is not None:
        refuse_younger_experts(base.parent)


def _checked(listing: Listing, base: Base, request: AddTask) -> Listing:
    """Spell the classes as the parent does, and refuse those that do not fit the request."""
    parent = base.parent
    if parent is None:
        return listing
    refuse_pretrained(request)
    listing = listing.spelt_as(parent.spec.classes)
    refuse_retired_classes(listing, parent.retired)
    refuse = refuse_new_classes if request.extend else refuse_known_classes
    refuse(listing, parent.classes)
    return listing


def _say_look_alikes(listing: Listing, base: Base, progress: Progress) -> tuple[str, ...]:
    """Note names that differ in case or form only; they stay two classes."""
    known = base.parent.classes if base.parent else ()
    new = [name for name in listing.names if name not in known]
    notes = notes_on_look_alikes(new, known=known)
    for note in notes:
        progress.note(f"note: {note}")
    return notes
