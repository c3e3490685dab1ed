"""Take jobs and run them: learn from the inbox, report, promote, end the job.

A worker may die at any moment, and another one takes its job over. A job is promoted once: its
version is noted before it is promoted, a worker that lost its job does not promote, and the channel
takes each record number once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from model_store.errors import (
    ClaimLost,
    DneError,
    Interrupted,
    JobCancelled,
    NothingToLearn,
    StoreError,
    StoreNotFound,
)
from model_store.jobs.claim import Claim
from model_store.jobs.jobs import Jobs
from model_store.jobs.waiting import lineage_of
from model_store.records.jobs import MadeVersion
from model_store.records.manifest import Manifest
from model_store.store.channel_moves import promote_or_explain
from model_store.store.store import Store
from trainer.inbox.reporting import Reporter
from trainer.progress import Progress
from trainer.request import AddTask

if TYPE_CHECKING:
    from trainer.inbox.from_inbox import FromInbox
    from trainer.versions.outcome import Outcome

log = logging.getLogger("dne_train")


class Learns(Protocol):
    """`learn_from_inbox`, with the way to add a task."""

    def __call__(
        self,
        request: AddTask,
        *,
        progress: Progress,
        but_used_by: Collection[int],
        on_published: Callable[[Manifest], None],
    ) -> FromInbox: ...


class Worker:
    """Runs the jobs of one channel, one at a time. `request` says how a task is learnt."""

    def __init__(self, request: AddTask, *, progress: Progress, learn: Learns) -> None:
        self._request, self._progress, self._learn = request, progress, learn
        self.done = 0
        """Jobs that this worker has run."""

    def run(self, *, once: bool, poll_s: float, stop: threading.Event) -> None:
        """Run jobs until `stop` is set; with `once` until none is left."""
        while not stop.is_set():
            claim = self._next()
            if claim is not None:
                self._run_safely(claim)
                self.done += 1
            elif once:
                break
            else:
                stop.wait(poll_s)

    def _next(self) -> Claim | None:
        try:
            store = Store.open(self._request.store)
            channel, worker = self._request.channel, self._request.actor
            return Jobs(store.objects).claim_next(channel=channel, worker=worker)
        except StoreNotFound:
            return None  # it may come
        except StoreError as error:
            log.warning("no look at the jobs of %s: %s", self._request.store, error)
            return None

    def _run_safely(self, claim: Claim) -> None:
        try:
            self._run_job(claim)
        except StoreError as error:  # the end could not be written: the lease ends by itself
            log.warning("job %s: left as it is: %s", claim.job, error)

    def _run_job(self, claim: Claim) -> None:
        log.info("job %s: begun, claim %s", claim.job, claim.number)
        reporter = Reporter(claim, self._progress)
        try:
            with reporter.beating():
                made = self._made(claim, reporter)
        except KeyboardInterrupt:
            if reporter.stopped_by is None:
                raise  # by a signal: the job is left to another worker
            self._end_badly(claim, reporter, Interrupted(str(reporter.stopped_by)))
            return
        except Exception as error:
            self._end_badly(claim, reporter, error)
            return
        refused = next((one.refused for one in made if one.refused), None)
        claim.end(
            "refused" if refused else "promoted",
            reason=refused or "",
            versions=made,
            log=reporter.log,
        )
        log.info("job %s: %s", claim.job, f"not promoted: {refused}" if refused else "promoted")

    def _made(self, claim: Claim, reporter: Reporter) -> list[MadeVersion]:
        """Finish the versions of workers that died, then learn from the labels that are left."""
        claim.check()
        store = Store.open(self._request.store)
        earlier = claim.versions()
        made = [self._finish(store, version) for version in earlier]

        def note(manifest: Manifest) -> None:
            claim.check()
            claim.made(manifest.version)

        try:
            learnt = self._learn(
                self._request, progress=reporter, but_used_by=earlier, on_published=note
            )
        except NothingToLearn:
            if not made:
                raise
            return made
        for outcome in learnt.outcomes:
            made += _described(outcome)
        return made

    def _finish(self, store: Store, version: int) -> MadeVersion:
        """Promote a version that an earlier worker has published, unless that was done."""
        manifest, channel = store.manifest(version), self._request.channel
        head = store.head(channel)
        refused: str | None = None
        if not _is_behind(store, version, channel):
            refused = f"the channel has moved meanwhile, so version {version} is a branch"
            if head is not None and head.target_digest == manifest.parent_digest:
                refused = promote_or_explain(
                    store,
                    manifest,
                    head=head,
                    channel=channel,
                    actor=self._request.actor,
                    reason="labels of the inbox were learnt",
                )
            if refused and _is_behind(store, version, channel):
                refused = None  # its own worker came back, and was faster
        return MadeVersion(version=version, promoted=refused is None, refused=refused)

    def _end_badly(self, claim: Claim, reporter: Reporter, error: Exception) -> None:
        stopped = reporter.stopped_by or error
        if isinstance(stopped, ClaimLost):
            log.warning("job %s: %s", claim.job, stopped)
            return
        if isinstance(error, Interrupted) and reporter.stopped_by is None:
            raise error  # by a signal: the job is left to another worker
        made = self._as_they_are(claim)
        if isinstance(stopped, JobCancelled):
            claim.end("cancelled", reason=str(error), versions=made, log=reporter.log)
            log.info("job %s: cancelled", claim.job)
            return
        if not isinstance(error, DneError):
            log.error("job %s: failed", claim.job, exc_info=error)
        said = str(error) if isinstance(error, DneError) else f"an error ({type(error).__name__})"
        claim.end("failed", reason=said, versions=made, log=reporter.log)
        log.info("job %s: failed: %s", claim.job, said)

    def _as_they_are(self, claim: Claim) -> list[MadeVersion]:
        """List the versions that the job has published, without promoting any."""
        store, channel = Store.open(self._request.store), self._request.channel
        return [
            MadeVersion(version=one, promoted=_is_behind(store, one, channel), refused=None)
            for one in claim.versions()
        ]


def _described(outcome: Outcome | None) -> list[MadeVersion]:
    """List the versions of an outcome: the one with a classifier, and the one with an expert."""
    if outcome is None:
        return []
    made = MadeVersion(
        version=outcome.manifest.version, promoted=outcome.promoted, refused=outcome.refused
    )
    return [made, *_described(outcome.deeper)]


def _is_behind(store: Store, version: int, channel: str) -> bool:
    head = store.head(channel)
    return head is not None and version in lineage_of(store, store.resolve(head)).numbers
