"""Learn, judge and publish one version, and promote it if the gate lets it pass.

Nothing of the version can be seen before it is published.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from model_store.advice.kept import write_advice
from model_store.advice.record import Advice
from model_store.errors import Interrupted, OutcomeUnknown, StoreError
from model_store.records.describe import verdict
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.store.channel_moves import promote_or_explain
from model_store.store.store import Store
from trainer.advice.of_run import advise_on
from trainer.assess import can_doubt, say_evidence
from trainer.base import Base
from trainer.data.sources.place import shown
from trainer.data.task_data import TaskData
from trainer.evaluation.forecast import Before, Forecast, forecast
from trainer.evaluation.training_run import training_run
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.configuration import configuration_of
from trainer.learning.learn import learn, plan_of
from trainer.learning.plan import Plan
from trainer.learning.student import Student
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, RankLost, Ranks, refuse_differences
from trainer.request import Learning
from trainer.version_draft import draft_version, finish

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
    advice: Advice | None = None
    """None in the ranks after the first, which has the images' tokens."""
    notes: tuple[str, ...] = ()
    """Warnings about the names of the classes."""
    deeper: Outcome | None = None
    """The version with an expert that the run published after this one."""

    @property
    def any_refused(self) -> str | None:
        """Say why this version, or the one after it, was not promoted."""
        return self.refused or (self.deeper.refused if self.deeper else None)

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
            "deepened": list(manifest.deepened),
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
            "advice": self.advice and self.advice.model_dump(mode="json", by_alias=True),
            "seconds": round(self.seconds, 3),
            "deeper": self.deeper and self.deeper.as_json(),
        }


def learn_version(
    base: Base,
    *,
    request: Learning,
    progress: Progress,
    prepare: Callable[[], tuple[Student, TaskData]],
    ranks: Ranks = ALONE,
) -> tuple[Outcome, TaskData]:
    """Learn what `prepare` returns, and publish it. The base's shards are announced meanwhile.

    Return the images too: a version that follows learns from them again. All ranks learn, and the
    first one judges and publishes.
    """
    started = time.monotonic()
    transaction = ranks.from_first(uuid.uuid4().hex.encode()).decode()
    announced = base if ranks.rank == 0 else None
    _announce(announced, transaction)
    checkpoint = None
    advice: Advice | None = None
    try:
        student, data = prepare()
        expected = _forecast(student, base, data)
        progress.note(str(expected))
        say_evidence(student, data=data, limits=request.limits, progress=progress)
        plan = plan_of(student, images=data.for_training, request=request)
        checkpoint = _checkpoint(
            student, data, plan, request=request, progress=progress, ranks=ranks
        )
        learnt = learn(
            student,
            data=data,
            plan=plan,
            request=request,
            progress=progress,
            checkpoint=checkpoint,
            ranks=ranks,
        )
        final = finish(student, data=data, request=request, learnt=learnt, ranks=ranks)

        def publish() -> tuple[Manifest, str | None]:
            nonlocal advice
            draft, shards = draft_version(
                student,
                base=base,
                data=data,
                request=request,
                transaction=transaction,
                learnt=learnt,
                final=final,
                run=training_run(
                    request,
                    seconds=time.monotonic() - started,
                    device=student.network.device.type,
                    latency_ms=expected.version.latency_ms,
                ),
            )
            ranks.total(0)  # all ranks are still there, or nothing is published
            store = base.made_store()
            manifest = store.publish(draft, shards=shards, signer=request.signer)
            if checkpoint:
                checkpoint.remove()
            if request.on_published:
                request.on_published(manifest)
            refused = _promote(store, manifest, base=base, request=request)
            # After that: nobody who waits for the version has to wait for the advice on it.
            advice = advise_on(student, data=data, learnt=learnt, cache=final.cache)
            if request.keeps_pictures:  # else nothing that names single images is kept
                _keep_advice(store, manifest, advice, progress)
            return manifest, refused

        manifest, refused = _published_by_first(ranks, base, publish)
    except OutcomeUnknown:
        raise  # the version may be there, so its shards stay announced
    except KeyboardInterrupt as error:
        _withdraw(announced, transaction)
        where = _where_it_stopped(base, transaction, request, checkpoint)
        raise Interrupted(f"interrupted: {where}") from error
    except RankLost as error:
        _withdraw(announced, transaction)
        where = _where_it_stopped(base, transaction, request, checkpoint)
        raise RankLost(f"{error}: {where}") from error
    except Exception:
        _withdraw(announced, transaction)
        raise
    outcome = Outcome(
        manifest=manifest,
        parent=base.parent,
        promoted=request.promote and refused is None,
        refused=refused,
        forecast=expected,
        seconds=time.monotonic() - started,
        advice=advice,
    )
    return outcome, data


def _keep_advice(store: Store, manifest: Manifest, advice: Advice, progress: Progress) -> None:
    """Write the advice beside the version, which is published and needs no advice."""
    try:
        write_advice(store, manifest, advice)
    except StoreError as error:
        progress.note(f"the advice on version {manifest.version} is not kept: {error}")


def _published_by_first(
    ranks: Ranks, base: Base, publish: Callable[[], tuple[Manifest, str | None]]
) -> tuple[Manifest, str | None]:
    """Let the first rank publish a version, and tell the others its number."""
    if ranks.rank == 0:
        manifest, refused = publish()
        ranks.from_first(json.dumps([manifest.version, refused]).encode())
        return manifest, refused
    ranks.total(0)
    version, refused = json.loads(ranks.from_first(b""))
    return Store.open(base.location).manifest(version), refused


def _announce(base: Base | None, transaction: str) -> None:
    """Announce the shards that this run needs, so that no housekeeping removes them meanwhile."""
    if base is not None and base.store is not None and base.parent is not None:
        digests = [ref.sha256 for ref in base.parent.shards]
        base.store.announce(transaction, parent=base.parent.version, digests=digests)


def _withdraw(base: Base | None, transaction: str) -> None:
    with suppress(StoreError):  # an announcement expires; the fault of the run must be seen
        store = base.store_now() if base else None
        if store is not None:
            store.withdraw(transaction)


def _forecast(student: Student, base: Base, data: TaskData) -> Forecast:
    before = None
    if base.parent is not None:
        before = Before(
            spec=base.parent.spec,
            expert_bytes=total_bytes(base.parent.experts),
            classifier_bytes=base.parent.classifier.bytes,
            doubt_bytes=base.parent.doubt.bytes if base.parent.doubt else 0,
        )
    return forecast(
        student.network,
        experts=student.lineage(),
        images=data.new_images,
        parent=before,
        doubts=can_doubt(student, data),
    )


def _checkpoint(
    student: Student,
    data: TaskData,
    plan: Plan | None,
    *,
    request: Learning,
    progress: Progress,
    ranks: Ranks,
) -> Checkpoint | None:
    """Open this run's checkpoint, which an interrupted run may have left.

    Refuse ranks whose images, start or options differ.
    """
    if request.checkpoint is None and ranks.count == 1:
        return None
    configuration = configuration_of(student, images=data.for_training, plan=plan, request=request)
    refuse_differences(ranks, configuration, what="data")
    if request.checkpoint is None:
        return None
    return Checkpoint(
        request.checkpoint, configuration=configuration, progress=progress, ranks=ranks
    )


def _promote(store: Store, manifest: Manifest, *, base: Base, request: Learning) -> str | None:
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


def _reason(manifest: Manifest, request: Learning) -> str:
    """Write the line of the channel's history; it tells of a gate that was overruled."""
    reason = request.reason or _done(manifest)
    gate = manifest.metrics.gate
    if gate is None or not gate.forced:
        return reason
    return f"{reason} (forced: {'; '.join(gate.reasons)})"[:MAX_REASON]


def _done(manifest: Manifest) -> str:
    if manifest.deepened:
        return f"an expert for {', '.join(manifest.deepened)}"[:MAX_REASON]
    if manifest.extended:
        return f"more images of {', '.join(manifest.extended)}"[:MAX_REASON]
    return f"task {manifest.tasks[-1].name} was learnt"


def _where_it_stopped(
    base: Base, transaction: str, request: Learning, checkpoint: Checkpoint | None
) -> str:
    store = base.store_now()
    newest = store.newest() if store else None
    if store is None or newest is None or store.manifest(newest).transaction != transaction:
        if checkpoint is None or checkpoint.reached is None:
            return "nothing was published"
        return (
            "nothing was published; the same command goes on after "
            f"{checkpoint.reached}, which is kept in {shown(checkpoint.folder)}"
        )
    head = store.head(request.channel)
    promoted = "promoted" if head and head.target == newest else "not promoted"
    return f"version {newest} was published just before, and {promoted}"
