"""Learn one task, from a folder of images to a version that is promoted.

After a pre-trained start a task is learnt at two speeds: first a version whose delta is a
classifier, within seconds, and then, if that is asked for, a version with an expert for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from model_store.errors import WrongUsage
from model_store.names import notes_on_look_alikes
from model_store.records.manifest import Manifest
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
from trainer.data.task_data import TaskData, read_again, read_task_data
from trainer.deepen import deepen_with
from trainer.learning.student import Student
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import AddTask
from trainer.start.first_network import refuse_pretrained
from trainer.start.make_student import make_student
from trainer.versions.one_version import learn_version
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
    if base.parent and request.quick is False:
        again = _learnt_quickly(listing, base=base, request=request, progress=progress)
        if again is not None:
            return deepen_with(base, data=again, request=request, progress=progress, ranks=ranks)
    if base.parent:
        listing = _checked(listing, base.parent, request)
    notes = _say_look_alikes(listing, base, progress)
    before = base.parent.hierarchy if base.parent else None
    known = base.parent.spec.classes if base.parent else ()
    hierarchy = merged(before, parents, classes=(*known, *listing.names))

    def prepare() -> tuple[Student, TaskData]:
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
        return student, data

    outcome, data = learn_version(
        base, request=request, progress=progress, prepare=prepare, ranks=ranks
    )
    outcome = replace(outcome, notes=notes, seconds=time.monotonic() - started)
    lacks_expert = bool(outcome.manifest.spec.tasks_without_expert)
    if request.quick is not False or outcome.refused or not lacks_expert:
        return outcome
    now = replace(base_of(request), parent=outcome.manifest)
    deeper = deepen_with(now, data=data, request=request, progress=progress, ranks=ranks)
    return replace(outcome, deeper=deeper)


def _on_pretrained(base: Base, request: AddTask) -> bool:
    if base.parent is not None:
        return base.parent.spec.is_pretrained
    return request.pretrained is not None


def _refuse_memory(base: Base, request: AddTask) -> None:
    if not request.keeps_pictures and not _on_pretrained(base, request):
        raise WrongUsage(
            "--memory statistics is for a model with a pre-trained start: without one a new expert "
            "needs pictures of old classes; --memory 0 keeps no exemplars"
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
    if request.quick is None:
        return
    if not _on_pretrained(base, request):
        option = "--quick" if request.quick else "--no-quick"
        raise WrongUsage(
            f"{option} is for a model with a pre-trained start: without one the expert is what "
            "knows the new classes, and every task has one"
        )


def _learnt_quickly(
    listing: Listing, *, base: Base, request: AddTask, progress: Progress
) -> TaskData | None:
    """Read the images again, if they are those of the newest task, which has no expert yet.

    A run that was stopped after its first version goes on from there.
    """
    assert base.parent is not None
    newest = base.parent.tasks[-1]
    listing = listing.spelt_as(base.parent.spec.classes)
    if newest.expert is not None or set(listing.names) != set(newest.classes):
        return None
    data = read_again(listing, base=base, request=request, progress=progress)
    if newest.training.get("data") != data.digest:
        return None
    progress.note(
        f"version {base.parent.version} has these images as task {newest.name}; its expert is next"
    )
    return data


def _checked(listing: Listing, parent: Manifest, request: AddTask) -> Listing:
    """Spell the classes as the parent does, and refuse those that do not fit the request."""
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
