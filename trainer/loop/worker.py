"""Run `dne-train worker`: take jobs, learn from the inbox, report, promote, and end the jobs.

A worker may die at any moment, and another one takes over its job. A version is promoted once: it
is noted in the job before it is promoted, a worker that lost its job does not promote, and the
channel accepts each record number once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

from model_store.cli.command import current_actor
from model_store.errors import (
    ClaimLost,
    DneError,
    Interrupted,
    JobCancelled,
    NothingToLearn,
    PicturesGone,
    StoreError,
    StoreNotFound,
    VersionDeleted,
)
from model_store.loop.claim import JobClaim
from model_store.loop.inbox import Inbox
from model_store.loop.jobs import Jobs
from model_store.loop.waiting import version_path
from model_store.maintenance.forget import drop_removed, forget_version
from model_store.records.jobs import MadeVersion
from model_store.records.manifest import Manifest
from model_store.store.cache import tokens_folder
from model_store.store.store import Store
from trainer.loop.learn import NAME, learn_from_inbox
from trainer.loop.pictures import refuse_if_gone
from trainer.loop.reporting import Reporter
from trainer.progress import Progress, show_progress
from trainer.request import AddTask, Work
from trainer.versions.outcome import Outcome

log = logging.getLogger("dne_train")
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Worker:
    """Runs the jobs of one channel, one at a time. `request` holds the options of learning."""

    def __init__(self, request: AddTask, *, progress: Progress) -> None:
        self._request, self._progress = request, progress
        self.done = 0
        """Jobs that this worker has run."""

    def run(self, *, once: bool, poll_s: float, stop: threading.Event) -> None:
        """Run jobs until `stop` is set, or with `once` until none is left."""
        self._drop_removed()
        while not stop.is_set():
            claim = self._next()
            if claim is not None:
                self._run_safely(claim)
                self.done += 1
            elif once:
                break
            else:
                stop.wait(poll_s)

    def _drop_removed(self) -> None:
        """Delete files that a killed worker left of images that the store has removed."""
        try:
            drop_removed(Store.open(self._request.store))
        except StoreError as error:  # the next run tries again
            log.info("removals from %s cannot be read: %s", self._request.store, error)

    def _next(self) -> JobClaim | None:
        try:
            store = self._open()
            channel, worker = self._request.channel, self._request.actor
            return Jobs(store.objects, keys=store.keys).claim_next(channel=channel, worker=worker)
        except StoreNotFound:
            return None  # it may be created later
        except StoreError as error:
            log.warning("the jobs of %s cannot be read: %s", self._request.store, error)
            return None

    def _open(self) -> Store:
        return Store.open(self._request.store, keys=self._request.keys)

    def _run_safely(self, claim: JobClaim) -> None:
        try:
            self._run_job(claim)
        except StoreError as error:  # the end could not be written: the lease will expire
            log.warning("job %s: its end cannot be recorded: %s", claim.job, error)

    def _run_job(self, claim: JobClaim) -> None:
        log.info("job %s: begun, claim %s", claim.job, claim.number)
        reporter = Reporter(claim, self._progress)
        try:
            with reporter.heartbeats():
                made = self._made(claim, reporter)
        except KeyboardInterrupt:
            if reporter.stopped_by is None:
                raise  # by a signal: the job is left to another worker
            self._end_badly(claim, reporter, Interrupted(str(reporter.stopped_by)))
            return
        except Exception as error:
            self._end_badly(claim, reporter, error)
            return
        refused = next((version.refused for version in made if version.refused), None)
        claim.end(
            "refused" if refused else "promoted",
            reason=refused or "",
            versions=made,
            log=reporter.log,
        )
        log.info("job %s: %s", claim.job, f"not promoted: {refused}" if refused else "promoted")

    def _made(self, claim: JobClaim, reporter: Reporter) -> list[MadeVersion]:
        """Finish the versions of workers that died, and then learn from the remaining labels."""
        claim.check()
        store = self._open()
        earlier = claim.versions()
        made = [self._finish(store, version) for version in earlier]

        def note(manifest: Manifest) -> None:
            claim.check()
            claim.made(manifest.version)

        try:
            learnt = learn_from_inbox(
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
        """Promote a version that an earlier worker has published, unless it is promoted already."""
        try:
            manifest, channel = store.manifest(version), self._request.channel
        except VersionDeleted as error:
            return MadeVersion(version=version, promoted=False, refused=str(error))
        head = store.head(channel)
        refused: str | None = None
        if not _is_behind(store, version, channel):
            refused = self._refuse_forgotten(store, manifest)
            if refused is not None:
                return MadeVersion(version=version, promoted=False, refused=refused)
            refused = f"the channel has moved meanwhile, so version {version} is a branch"
            if head is not None and head.target_digest == manifest.parent_digest:
                refused = store.channel(channel).promote_or_explain(
                    manifest,
                    head=head,
                    actor=self._request.actor,
                    reason="labels of the inbox were learnt",
                )
            if refused and _is_behind(store, version, channel):
                refused = None  # its own worker came back and was faster
        return MadeVersion(version=version, promoted=refused is None, refused=refused)

    def _refuse_forgotten(self, store: Store, manifest: Manifest) -> str | None:
        """Delete a version whose pictures were deleted before it was promoted, and return the
        reason; None if all pictures are there."""
        inbox = Inbox(store.objects)
        used = inbox.used().get(manifest.version)
        try:
            refuse_if_gone(inbox, used.items if used else ())
        except PicturesGone as error:
            forget_version(store, manifest, actor=self._request.actor, reason=str(error))
            return str(error)
        return None

    def _end_badly(self, claim: JobClaim, reporter: Reporter, error: Exception) -> None:
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
        # The log of a run whose pictures are gone may name their class.
        log_lines = () if isinstance(error, PicturesGone) else reporter.log
        said = str(error) if isinstance(error, DneError) else f"an error ({type(error).__name__})"
        claim.end("failed", reason=said, versions=made, log=log_lines)
        log.info("job %s: failed: %s", claim.job, said)

    def _as_they_are(self, claim: JobClaim) -> list[MadeVersion]:
        """List the versions that the job has published, without promoting any."""
        store, channel = self._open(), self._request.channel
        return [
            MadeVersion(version=version, promoted=_is_behind(store, version, channel), refused=None)
            for version in claim.versions()
        ]


def _described(outcome: Outcome | None) -> list[MadeVersion]:
    """List the versions of an outcome: the quick one, and the one with an expert, if any."""
    if outcome is None:
        return []
    made = MadeVersion(
        version=outcome.manifest.version, promoted=outcome.promoted, refused=outcome.refused
    )
    return [made, *_described(outcome.deeper)]


def _is_behind(store: Store, version: int, channel: str) -> bool:
    """Return whether a version is the channel's head or an ancestor of it."""
    head = store.head(channel)
    return head is not None and version in version_path(store, store.resolve(head)).numbers


def run_worker(work: Work, *, checkpoint: Path) -> int:
    """Run jobs, and return their number. A signal ends the worker; another worker takes its job."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    signal.signal(signal.SIGTERM, _interrupt)
    if work.until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    request = AddTask(
        data=Path(NAME),
        store=work.store,
        channel=work.channel,
        device=work.device,
        memory=work.memory,
        limits=work.limits,
        keys=work.keys,
        checkpoint=checkpoint,
        tokens=tokens_folder(work.store),
        reason="labels of the inbox",
        skip_bad=True,
        grows_by_itself=False,  # a job promotes the versions that it has noted, and no others
        actor=current_actor(),
        command="dne-train worker",
    )
    worker = Worker(request, progress=show_progress())
    try:
        worker.run(once=work.once, poll_s=work.poll_seconds, stop=threading.Event())
    except KeyboardInterrupt:
        log.info("ended while no job was under way")
    return worker.done


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end_with_stdin() -> None:
    """Interrupt this process when the other end of its standard input closes."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
