"""Learn one task, from a folder of images to a version that is promoted."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from model_store.errors import Interrupted, OutcomeUnknown, StoreError
from model_store.names import notes_on_look_alikes
from model_store.records.describe import verdict
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.store.channel_moves import promote_or_explain
from model_store.store.store import Store
from trainer.assess import say_evidence
from trainer.base import Base, base_of
from trainer.data.checks import (
    refuse_known_classes,
    refuse_nested,
    refuse_new_classes,
    refuse_retired_classes,
)
from trainer.data.folders import Listing, list_classes, note_ignored, shown
from trainer.data.task_data import TaskData, read_task_data
from trainer.evaluation.forecast import Before, Forecast, forecast
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.configuration import configuration_of
from trainer.learning.learn import learn, plan_of
from trainer.learning.plan import Plan
from trainer.learning.student import Student, make_student, refuse_pretrained
from trainer.progress import Progress
from trainer.request import AddTask
from trainer.version_draft import draft_version

MAX_REASON = 2000
"""Characters that a channel record takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run. `refused` says why a version was published and not promoted."""

    manifest: Manifest
    parent: Manifest | None
    promoted: bool
    refused: str | None
    forecast: Forecast
    seconds: float
    notes: tuple[str, ...] = ()
    """Warnings about the names of the classes."""

    def as_json(self) -> dict[str, Any]:
        manifest = self.manifest
        gate = manifest.metrics.gate
        return {
            "version": manifest.version,
            "parent": manifest.parent,
            "tasks": len(manifest.tasks),
            "classes": len(manifest.classes),
            "new_classes": list(manifest.new_classes),
            "extended": list(manifest.extended),
            "accuracy": manifest.metrics.accuracy.model_dump(),
            "calibration": manifest.calibration.model_dump(),
            "unknown": manifest.unknown and manifest.unknown.model_dump(),
            "gate": gate and gate.model_dump(by_alias=True),
            "judged": {"old": gate.old_images, "new": gate.new_images} if gate else None,
            "verdict": verdict(manifest),
            "promoted": self.promoted,
            "refused": self.refused,
            "notes": list(self.notes),
            "delta_bytes": total_bytes(delta_of(manifest, self.parent)),
            "total_bytes": total_bytes(manifest.model_shards),
            "memory_bytes": total_bytes(manifest.image_shards),
            "forecast": self.forecast.as_json(),
            "seconds": round(self.seconds, 3),
        }


def add_task(request: AddTask, *, progress: Progress) -> Outcome:
    """Train, judge and publish a version, and promote it if the gate lets it pass.

    Nothing of the version can be seen before it is published.
    """
    started = time.monotonic()
    listing = list_classes(request.data)
    refuse_nested(listing)
    note_ignored(listing, progress)
    base = base_of(request)
    if base.parent:
        listing = _checked(listing, base.parent, request)
    notes = _say_look_alikes(listing, base, progress)
    transaction = uuid.uuid4().hex
    _announce(base, transaction)
    checkpoint = None
    try:
        student = make_student(base, request=request, new=listing, progress=progress)
        data = read_task_data(
            listing,
            base=base,
            request=request,
            classes=student.network.spec.classes,
            preprocessing=student.preprocessing,
            progress=progress,
        )
        expected = _forecast(student, base, images=listing.images)
        progress.note(str(expected))
        say_evidence(student, data=data, limits=request.limits, progress=progress)
        plan = plan_of(student, images=data.for_training, request=request)
        checkpoint = _checkpoint(student, data, plan, request=request, progress=progress)
        training = learn(
            student,
            data=data,
            plan=plan,
            request=request,
            progress=progress,
            checkpoint=checkpoint,
        )
        draft, shards = draft_version(
            student,
            base=base,
            data=data,
            request=request,
            transaction=transaction,
            training=training,
        )
        store = base.made_store()
        manifest = store.publish(draft, shards=shards, signer=request.signer)
        if checkpoint:
            checkpoint.remove()
        refused = _promote(store, manifest, base=base, request=request)
    except OutcomeUnknown:
        raise  # the version may be there, so its shards stay announced
    except KeyboardInterrupt as error:
        _withdraw(base, transaction)
        raise Interrupted(_where_it_stopped(base, transaction, request, checkpoint)) from error
    except Exception:
        _withdraw(base, transaction)
        raise
    return Outcome(
        manifest=manifest,
        parent=base.parent,
        promoted=request.promote and refused is None,
        refused=refused,
        forecast=expected,
        seconds=time.monotonic() - started,
        notes=notes,
    )


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


def _announce(base: Base, transaction: str) -> None:
    """Announce the shards that this run needs, so that no housekeeping removes them meanwhile."""
    if base.store is not None and base.parent is not None:
        digests = [ref.sha256 for ref in base.parent.shards]
        base.store.announce(transaction, parent=base.parent.version, digests=digests)


def _withdraw(base: Base, transaction: str) -> None:
    with suppress(StoreError):  # an announcement expires; the fault of the run must be seen
        store = base.store_now()
        if store is not None:
            store.withdraw(transaction)


def _forecast(student: Student, base: Base, *, images: int) -> Forecast:
    before = None
    if base.parent is not None:
        before = Before(
            spec=base.parent.spec,
            expert_bytes=total_bytes(tuple(task.expert for task in base.parent.tasks)),
            classifier_bytes=base.parent.classifier.bytes,
        )
    return forecast(student.network, experts=student.lineage(), images=images, parent=before)


def _checkpoint(
    student: Student, data: TaskData, plan: Plan | None, *, request: AddTask, progress: Progress
) -> Checkpoint | None:
    """Open this run's checkpoint, which an interrupted run may have left."""
    if request.checkpoint is None:
        return None
    configuration = configuration_of(student, images=data.for_training, plan=plan, request=request)
    return Checkpoint(request.checkpoint, configuration=configuration, progress=progress)


def _promote(store: Store, manifest: Manifest, *, base: Base, request: AddTask) -> str | None:
    """Promote the version, if that is asked for. Return the reason against it, if there is one."""
    if not request.promote:
        return None
    return promote_or_explain(
        store,
        manifest,
        head=base.head,
        channel=request.channel,
        actor=request.actor,
        reason=_reason(manifest, request),
    )


def _reason(manifest: Manifest, request: AddTask) -> str:
    """Write the line of the channel's history; it tells of a gate that was overruled."""
    reason = request.reason or _done(manifest)
    gate = manifest.metrics.gate
    if gate is None or not gate.forced:
        return reason
    return f"{reason} (forced: {'; '.join(gate.reasons)})"[:MAX_REASON]


def _done(manifest: Manifest) -> str:
    if manifest.extended:
        return f"more images of {', '.join(manifest.extended)}"[:MAX_REASON]
    return f"task {manifest.tasks[-1].name} was learnt"


def _where_it_stopped(
    base: Base, transaction: str, request: AddTask, checkpoint: Checkpoint | None
) -> str:
    store = base.store_now()
    newest = store.newest() if store else None
    if store is None or newest is None or store.manifest(newest).transaction != transaction:
        if checkpoint is None or checkpoint.reached is None:
            return "interrupted: nothing was published"
        return (
            "interrupted: nothing was published; the same command goes on after "
            f"{checkpoint.reached}, which is kept in {shown(checkpoint.folder)}"
        )
    head = store.head(request.channel)
    promoted = "promoted" if head and head.target == newest else "not promoted"
    return f"interrupted: version {newest} was published just before, and {promoted}"
