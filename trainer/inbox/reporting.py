"""Report the progress of a run as beats of its job, and stop the run where the job asks for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_store.errors import ClaimLost, JobCancelled, StoreError
from model_store.jobs.claim import Claim
from model_store.records.jobs import MAX_LOG_LINES
from model_store.tables import counted
from trainer.progress import Phase, Progress
from trainer.time_left import ExpectedPhase, TimeLeft

BEAT_S = 1.0
"""Time between two looks at the job, and between two beats while something changes."""
QUIET_BEAT_S = 5.0
"""Time between two beats while nothing changes."""

log = logging.getLogger("dne_train")


@dataclass(slots=True)
class _State:
    """The phase of the run. Written by the run, and read by the thread that beats."""

    name: str = "beginning"
    started: float = 0.0
    all_phases: TimeLeft = field(default_factory=lambda: TimeLeft(()))
    """Those of the run; of this phase alone while no run has begun."""
    counts: bool = False
    """True if the share of the work that is done is known."""

    def share(self) -> float | None:
        return min(1.0, self.all_phases.share) if self.counts else None

    def seconds_left(self) -> float | None:
        return self.all_phases.seconds() if self.counts else None


class Reporter:
    """Progress of a run that is also told to its job. A run is stopped as by Ctrl-C, at its next
    step, so that it keeps its checkpoint."""

    def __init__(self, claim: Claim, shown: Progress) -> None:
        self._claim, self._shown = claim, shown
        self._state = _State()
        self._whole: TimeLeft | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._over = threading.Event()
        self._beaten: tuple[object, ...] = ()
        self._beat_at = 0.0
        self.stopped_by: ClaimLost | JobCancelled | None = None

    @property
    def log(self) -> tuple[str, ...]:
        return tuple(self._lines)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beat until the block ends."""
        self._beat()
        thread = threading.Thread(target=self._keep_beating, name="beats", daemon=True)
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

    def _keep_beating(self) -> None:
        while not self._over.wait(BEAT_S) and self.stopped_by is None:
            try:
                self._claim.check()
                self._beat()
            except (ClaimLost, JobCancelled) as error:
                self.stopped_by = error
            except StoreError as error:  # the store may be back before the lease ends
                log.warning("job %s: no beat: %s", self._claim.job, error)

    def _beat(self) -> None:
        state, now = self._state, time.monotonic()
        facts = (state.name, state.share(), self.log)
        if facts == self._beaten and now - self._beat_at < QUIET_BEAT_S:
            return
        self._claim.beat(
            state.name, share=state.share(), seconds_left=state.seconds_left(), log=self.log
        )
        self._beaten, self._beat_at = facts, now


class _ReportedPhase:
    def __init__(self, reporter: Reporter, shown: Phase) -> None:
        self._reporter, self._shown = reporter, shown

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._shown.advance(images, loss=loss, accuracy=accuracy)
        self._reporter.advance(images)
