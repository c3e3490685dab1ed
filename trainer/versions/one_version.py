"""Learn, judge and publish one version, and promote it if the gate lets it pass.

Nothing of the version can be seen before it is published.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from model_store.errors import Interrupted, OutcomeUnknown, PicturesGone, StoreError
from model_store.maintenance.forget import drop_removed, forget_version
from model_store.records.manifest import Draft, Manifest, total_bytes
from model_store.report.advice import Advice, write_advice
from model_store.store.store import Store
from model_store.tables import counted
from trainer.advice.advise import advise_on
from trainer.base import Base
from trainer.data.sources.place import shown
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import drop_embeddings
from trainer.evaluation.forecast import Before, Forecast, forecast
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learn import learn, plan_of
from trainer.learning.plan import Plan, configuration_of
from trainer.learning.student import Learnt, Student
from trainer.learning.token_reading import parent_cache_of, reduced_tokens_of
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, RankLost, Ranks, refuse_differences
from trainer.request import Learning, training_run
from trainer.versions.assess import assess, can_doubt, say_evidence
from trainer.versions.expected import expected_phases
from trainer.versions.finish import Final, finish
from trainer.versions.outcome import Outcome
from trainer.versions.version_draft import Shards, draft_version, encode_model

MAX_REASON = 2000
"""Characters that a channel record takes."""
PUBLISHING, ADVISING = "publishing", "looking what would help most"


@contextmanager
def announced(
    base: Base, *, request: Learning, progress: Progress, ranks: Ranks = ALONE
) -> Iterator[Run]:
    """Announce the shards of the base, so that no housekeeping removes them during the run. All
    ranks learn, and the first one judges and publishes."""
    transaction = ranks.from_first(uuid.uuid4().hex.encode()).decode()
    at_first_rank = base if ranks.rank == 0 else None
    if at_first_rank and at_first_rank.store and request.tokens is not None:
        drop_removed(at_first_rank.store)
    _announce(at_first_rank, transaction)
    run = Run(
        base=base,
        request=request,
        progress=progress,
        ranks=ranks,
        transaction=transaction,
        forgotten=base.store.forgotten() if base.store else frozenset(),
    )
    try:
        yield run
    except PicturesGone:
        _withdraw(at_first_rank, transaction)
        run.drop_kept()
        raise
    except OutcomeUnknown:
        raise  # the version may be there, so its shards stay announced
    except KeyboardInterrupt as error:
        _withdraw(at_first_rank, transaction)
        raise Interrupted(f"interrupted: {run.where_it_stopped()}") from error
    except RankLost as error:
        _withdraw(at_first_rank, transaction)
        raise RankLost(f"{error}: {run.where_it_stopped()}") from error
    except Exception:
        _withdraw(at_first_rank, transaction)
        raise


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, and the checkpoint that it keeps once it has its images."""

    base: Base
    request: Learning
    progress: Progress
    ranks: Ranks
    transaction: str
    forgotten: frozenset[str]
    """Shards that were forgotten before the run began."""
    checkpoint: Checkpoint | None = None
    started_s: float = field(default_factory=time.monotonic)

    def learn(self, student: Student, data: TaskData) -> Outcome:
        """Teach the student, judge it, publish it, and promote it if the gate lets it pass."""
        expected = _forecast(student, self.base, data)
        self.progress.note(str(expected))
        say_evidence(student, data=data, limits=self.request.limits, progress=self.progress)
        plan = plan_of(student, images=data.for_training, request=self.request)
        self.checkpoint = self._open_checkpoint(student, data, plan)
        phases = expected_phases(student, data=data, plan=plan, request=self.request)
        with self.progress.whole(phases):
            learnt, final = self._teach(student, data, plan)
            published = self._publish_by_first(student, data, learnt, final, expected)
        return Outcome(
            manifest=published.manifest,
            parent=self.base.parent,
            promoted=self.request.promote and published.refused is None,
            refused=published.refused,
            served=published.served,
            forecast=expected,
            seconds=time.monotonic() - self.started_s,
            advice=published.advice,
        )

    def _teach(self, student: Student, data: TaskData, plan: Plan | None) -> tuple[Learnt, Final]:
        learnt = learn(
            student,
            data=data,
            plan=plan,
            request=self.request,
            progress=self.progress,
            checkpoint=self.checkpoint,
            ranks=self.ranks,
        )
        final = finish(
            student,
            data=data,
            request=self.request,
            learnt=learnt,
            progress=self.progress,
            ranks=self.ranks,
        )
        return learnt, final

    def _publish_by_first(
        self, student: Student, data: TaskData, learnt: Learnt, final: Final, expected: Forecast
    ) -> _Published:
        """Let the first rank publish a version, and tell the others its number."""
        if self.ranks.rank == 0:
            published = self._publish(student, data, learnt, final, expected)
            told = [published.manifest.version, published.refused]
            self.ranks.from_first(json.dumps(told).encode())
            return published
        self.ranks.total(0)
        version, refused = json.loads(self.ranks.from_first(b""))
        manifest = Store.open(self.base.location).manifest(version)
        return _Published(manifest=manifest, refused=refused)

    def _publish(
        self, student: Student, data: TaskData, learnt: Learnt, final: Final, expected: Forecast
    ) -> _Published:
        request, progress = self.request, self.progress
        draft, shards = self._draft(student, data, learnt, final, expected)
        self.ranks.total(0)  # all ranks are still there, or nothing is published
        store = self.base.made_store()
        with progress.phase(PUBLISHING, total=0):
            manifest = self._publish_remembered(store, draft, shards)
        if self.checkpoint:
            self.checkpoint.remove()
        if request.on_published:
            request.on_published(manifest)
        refused = _promote(store, manifest, base=self.base, request=request)
        # After that: nobody who waits for the version has to wait for the advice on it.
        with progress.phase(ADVISING, total=0):
            advice = advise_on(student, data=data, learnt=learnt, cache=final.cache)
        if request.keeps_pictures:  # else nothing that names single images is kept
            _keep_advice(store, manifest, advice, progress)
        served = _served(store, manifest, refused=refused, request=request)
        return _Published(manifest=manifest, refused=refused, served=served, advice=advice)

    def _publish_remembered(self, store: Store, draft: Draft, shards: Shards) -> Manifest:
        """Publish, unless images that the run has learnt from were forgotten meanwhile. Look again
        afterwards: `forget` looks for versions after it has deleted pictures, so one of the two
        sees the other."""
        self._refuse_forgotten(store)
        manifest = store.publish(draft, shards=shards, signer=self.request.keys.signer)
        try:
            self._refuse_forgotten(store)
        except PicturesGone as error:
            forget_version(store, manifest, actor=self.request.actor, reason=str(error))
            raise
        return manifest

    def _refuse_forgotten(self, store: Store) -> None:
        parent = self.base.parent
        kept = parent.kept_of_classes if parent else ()
        gone = {one.shard.sha256 for one in kept} & (store.forgotten() - self.forgotten)
        if gone:
            raise PicturesGone(
                "images of a class that this run has learnt from were forgotten meanwhile, so its "
                "version is not kept; run it again without them"
            )
        if self.request.before_publish:
            self.request.before_publish()

    def drop_kept(self) -> None:
        """Drop what the run has kept of its images on this machine."""
        if self.checkpoint:
            self.checkpoint.remove()
        if self.request.tokens is not None:
            drop_embeddings(self.request.tokens)

    def _draft(
        self, student: Student, data: TaskData, learnt: Learnt, final: Final, expected: Forecast
    ) -> tuple[Draft, Shards]:
        """Encode the model, judge it, and collect the contents of the version."""
        request = self.request
        model = encode_model(student, base=self.base, learnt=learnt)
        assessment = assess(
            student,
            experts=final.experts,
            cache=final.cache,
            parent_cache=parent_cache_of(student, folder=request.tokens),
            reduced_tokens=reduced_tokens_of(
                student, folder=request.tokens, progress=self.progress
            ),
            data=data,
            tokens_NW=learnt.tokens_NW,
            labels_N=learnt.labels_N,
            groups_N=learnt.groups_N,
            limits=request.limits,
            unknown_rate=request.unknown_rate,
            fitted_on=learnt.fitted_on,
            price=learnt.price,
            shows_images=request.keeps_pictures and data.source == "held-out",
            model_bytes=model.bytes,
            progress=self.progress,
        )
        if self.base.store is not None:
            self._refuse_forgotten(self.base.store)
        return draft_version(
            student,
            base=self.base,
            data=data,
            request=request,
            transaction=self.transaction,
            learnt=learnt,
            final=final,
            model=model,
            assessment=assessment,
            run=training_run(
                request,
                seconds=time.monotonic() - self.started_s,
                device=student.network.device.type,
                latency_ms=expected.version.latency_ms,
            ),
        )

    def _open_checkpoint(
        self, student: Student, data: TaskData, plan: Plan | None
    ) -> Checkpoint | None:
        """Open this run's checkpoint, which an interrupted run may have left.

        Refuse ranks whose images, start or options differ.
        """
        request, ranks = self.request, self.ranks
        if request.checkpoint is None and ranks.count == 1:
            return None
        configuration = configuration_of(
            student, images=data.for_training, plan=plan, request=request
        )
        refuse_differences(ranks, configuration, what="data")
        if request.checkpoint is None:
            return None
        return Checkpoint(
            request.checkpoint, configuration=configuration, progress=self.progress, ranks=ranks
        )

    def where_it_stopped(self) -> str:
        store = self.base.store_now()
        newest = store.newest() if store else None
        published = store and newest and store.manifest(newest).transaction == self.transaction
        if store is None or not published:
            if self.checkpoint is None or self.checkpoint.reached is None:
                return "nothing was published"
            return (
                "nothing was published; the same command goes on after "
                f"{self.checkpoint.reached}, which is kept in {shown(self.checkpoint.folder)}"
            )
        head = store.head(self.request.channel)
        promoted = "promoted" if head and head.target == newest else "not promoted"
        return f"version {newest} was published just before, and {promoted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    manifest: Manifest
    refused: str | None
    served: int | None = None
    """None in the ranks after the first, which tells the user."""
    advice: Advice | None = None


def _keep_advice(store: Store, manifest: Manifest, advice: Advice, progress: Progress) -> None:
    """Write the advice beside the version, which is published and needs no advice."""
    try:
        write_advice(store, manifest, advice)
    except StoreError as error:
        progress.note(f"the advice on version {manifest.version} is not kept: {error}")


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
        replaces=student.aim == "adaptation",
    )


def _promote(store: Store, manifest: Manifest, *, base: Base, request: Learning) -> str | None:
    """Promote the version, if that is asked for. Return the reason against it, if there is one."""
    if not request.promote:
        return None
    return store.channel(request.channel).promote_or_explain(
        manifest,
        head=base.head,
        actor=request.actor,
        reason=_reason(manifest, request),
    )


def _served(
    store: Store, manifest: Manifest, *, refused: str | None, request: Learning
) -> int | None:
    """Look which version the channel names now; None if it names none, or cannot be read."""
    if request.promote and refused is None:
        return manifest.version
    with suppress(StoreError):  # the version is published, and only this sentence is in doubt
        head = store.head(request.channel)
        return head.target if head else None
    return None


def _reason(manifest: Manifest, request: Learning) -> str:
    """Write the line of the channel's history; it tells of a gate that was overruled."""
    reason = request.reason or _done(manifest)
    gate = manifest.metrics.gate
    if gate is None or not gate.forced:
        return reason
    return f"{reason} (forced: {'; '.join(gate.reasons)})"[:MAX_REASON]


def _done(manifest: Manifest) -> str:
    if manifest.adapted:
        return (
            f"the first expert was adapted to {counted(len(manifest.classes), 'class', 'classes')}"
        )
    if manifest.deepened:
        return f"an expert for {', '.join(manifest.deepened)}"[:MAX_REASON]
    if manifest.corrected:
        return f"corrected images of {', '.join(manifest.extended)}"[:MAX_REASON]
    if manifest.extended:
        return f"more images of {', '.join(manifest.extended)}"[:MAX_REASON]
    return f"task {manifest.tasks[-1].name} was learnt"
