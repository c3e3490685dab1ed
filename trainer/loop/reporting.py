"""Report the progress of a run as heartbeats of its job, and stop the run if the job is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_store.errors import ClaimLost, JobCancelled, StoreError
from model_store.loop.claim import JobClaim
from model_store.records.jobs import MAX_LOG_LINES
from model_store.tables import counted
from trainer.progress import Phase, Progress
from trainer.time_left import ExpectedPhase, TimeLeft

HEARTBEAT_S = 1.0
"""Time between two looks at the job, and between two heartbeats while something changes."""
QUIET_HEARTBEAT_S = 5.0
"""Time between two heartbeats while nothing changes."""

log = logging.getLogger("dne_train")


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
        if facts == self._reported and now - self._reported_at < QUIET_HEARTBEAT_S:
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
