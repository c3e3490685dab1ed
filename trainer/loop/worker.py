"""Run `dne-train worker`: take jobs, learn from the inbox or adapt the network, report, promote,
and end the jobs.

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
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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
    WrongUsage,
)
from model_store.loop.claim import JobClaim
from model_store.loop.inbox import Inbox
from model_store.loop.jobs import Jobs
from model_store.loop.waiting import version_path
from model_store.maintenance.forget import drop_removed, forget_version
from model_store.records.jobs import MAX_LOG_LINES, JobRecord, MadeVersion
from model_store.records.manifest import Manifest
from model_store.store.cache import tokens_folder
from model_store.store.store import Store
from model_store.tables import counted
from trainer.backbones.known import backbone_named
from trainer.grow import deepen
from trainer.loop.learn import NAME, learn_from_inbox, refuse_if_gone
from trainer.progress import ExpectedPhase, Phase, Progress, TimeLeft, show_progress
from trainer.request import AddTask, Deepen, Learning, PretrainedFile, Work
from trainer.versions.outcome import Outcome

HEARTBEAT_S = 1.0
"""Time between two looks at the job, and between two heartbeats while something changes."""
_QUIET_HEARTBEAT_S = 5.0
"""Time between two heartbeats while nothing changes."""


@dataclass(slots=True)
class _State:
    """The phase of the run. The run writes it, and the thread of heartbeats reads it."""

    name: str = "beginning"
    started: float = 0.0
    all_phases: TimeLeft = field(default_factory=lambda: TimeLeft(()))
    """The phases of the run; this phase alone before a run begins."""
    counts: bool = False
    """True if the share of finished work is known."""

    def share(self) -> float | None:
        return min(1.0, self.all_phases.share) if self.counts else None

    def seconds_left(self) -> float | None:
        return self.all_phases.seconds() if self.counts else None


class Reporter:
    """Show the progress of a run, and report it to its job. Stop the run as Ctrl-C does, at its
    next step, so that it keeps its checkpoint."""

    def __init__(self, claim: JobClaim, shown: Progress) -> None:
        self._claim, self._shown = claim, shown
        self._state = _State()
        self._whole: TimeLeft | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._over = threading.Event()
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0
        self.stopped_by: ClaimLost | JobCancelled | None = None

    @property
    def log(self) -> tuple[str, ...]:
        return tuple(self._lines)

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send heartbeats until the block ends."""
        self._heartbeat()
        thread = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def note(self, text: str) -> None:
        self._lines.append(text)
        self._shown.note(text)
        self._stop_if_asked()

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        self._whole = TimeLeft(expected)
        try:
            with self._shown.whole(expected):
                yield
        finally:
            self._whole = None

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        self._stop_if_asked()
        alone = ExpectedPhase(name=name, images=total, gflop=1.0)
        all_phases = self._whole or TimeLeft([alone])
        all_phases.begin(name, images=total)
        self._state = _State(
            name=name,
            started=time.monotonic(),
            all_phases=all_phases,
            counts=total > 0 or self._whole is not None,
        )
        with self._shown.phase(name, total=total) as shown:
            yield _ReportedPhase(self, shown)
        images = f" {counted(total, 'image')}," if total else ""
        self._lines.append(f"{name}:{images} {self._elapsed_s():.1f} s")

    def advance(self, images: int) -> None:
        self._state.all_phases.advance(images)
        self._stop_if_asked()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._state.started

    def _stop_if_asked(self) -> None:
        if self.stopped_by is not None:
            raise KeyboardInterrupt

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_S) and self.stopped_by is None:
            try:
                self._claim.check()
                self._heartbeat()
            except (ClaimLost, JobCancelled) as error:
                self.stopped_by = error
            except StoreError as error:  # the store may be back before the lease ends
                log.warning("job %s: no heartbeat: %s", self._claim.job, error)

    def _heartbeat(self) -> None:
        state, now = self._state, time.monotonic()
        facts = (state.name, state.share(), self.log)
        if facts == self._reported and now - self._reported_at < _QUIET_HEARTBEAT_S:
            return
        self._claim.heartbeat(
            state.name, share=state.share(), seconds_left=state.seconds_left(), log=self.log
        )
        self._reported, self._reported_at = facts, now


class _ReportedPhase:
    def __init__(self, reporter: Reporter, shown: Phase) -> None:
        self._reporter, self._shown = reporter, shown

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._shown.advance(images, loss=loss, accuracy=accuracy)
        self._reporter.advance(images)


log = logging.getLogger("dne_train")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Worker:
    """Runs the jobs of one channel, one at a time. `request` holds the options of learning."""

    def __init__(self, request: AddTask, *, progress: Progress) -> None:
        self._request, self._progress = request, progress
        self.done = 0
        """Jobs that this worker has run."""

    def run(self, *, once: bool, poll_s: float, stop: threading.Event) -> None:
        """Run jobs until `stop` is set, or with `once` until none is left."""
        try:  # files that a killed worker left of images that the store has removed
            drop_removed(Store.open(self._request.store))
        except StoreError as error:  # the next run tries again
            log.info("removals from %s cannot be read: %s", self._request.store, error)
        while not stop.is_set():
            claim = self._next()
            if claim is not None:
                self._run_safely(claim)
                self.done += 1
            elif once:
                break
            else:
                stop.wait(poll_s)

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
        """Finish the versions of workers that died. Then do what the job asks for."""
        claim.check()
        store = self._open()
        earlier = claim.versions()
        made = [self._finish(store, version) for version in earlier]

        def note(manifest: Manifest) -> None:
            claim.check()
            claim.made(manifest.version)

        job = Jobs(store.objects, keys=store.keys).job(claim.job).record
        if job.kind == "grow":
            return made or _described(self._grow(reporter, on_published=note))
        try:
            learnt = learn_from_inbox(
                self._asked(store, job), progress=reporter, but_used_by=earlier, on_published=note
            )
        except NothingToLearn:
            if not made:
                raise
            return made
        for outcome in learnt.outcomes:
            made += _described(outcome)
        return made

    def _asked(self, store: Store, job: JobRecord) -> AddTask:
        """Make the request of a job. Its weights are for the first task: where another job was
        faster, they say nothing."""
        if job.pretrained is None or store.head(self._request.channel) is not None:
            return self._request
        if backbone_named(job.pretrained) is None:
            raise WrongUsage("a job takes weights by name, and no file of the worker's machine")
        return replace(self._request, pretrained=PretrainedFile(file=Path(job.pretrained)))

    def _grow(self, reporter: Reporter, *, on_published: Callable[[Manifest], None]) -> Outcome:
        """Adapt the version that the channel names."""
        given = {field.name: getattr(self._request, field.name) for field in fields(Learning)}
        given |= {"reason": "", "on_published": on_published}
        return deepen(Deepen(**given, kind="adapter", if_needed=True), progress=reporter)

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
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT)
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
