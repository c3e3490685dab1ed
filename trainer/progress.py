"""Show the progress of a run: notes, and phases with loss, accuracy, images/s and time left.

Write to stderr only: stdout is for answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TextIO

from model_store.tables import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPhase:
    """A phase that will come, and the operations that an image takes in it."""

    name: str
    images: int
    gflop: float

    @property
    def work(self) -> float:
        return self.images * self.gflop


class TimeLeft:
    """The time left in all expected phases.

    The phase that runs is judged by its own speed, and later ones by the operations a second of
    all phases so far. A phase that is passed over, such as one that a checkpoint has behind it, is
    taken out. A phase that was not expected counts as no work.
    """

    def __init__(
        self, expected: Sequence[ExpectedPhase], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._later, self._clock = list(expected), clock
        self._phase = ExpectedPhase(name="", images=0, gflop=0.0)
        self._done_images = 0
        self._began_s = clock()
        self._past_work = self._past_s = 0.0

    def begin(self, name: str, *, images: int) -> None:
        """Begin a phase: it may have fewer images than were expected."""
        self._past_work += self._done_work
        self._past_s += self._elapsed_s
        names = [phase.name for phase in self._later]
        place = names.index(name) if name in names else None
        if place is None:
            self._phase = ExpectedPhase(name=name, images=images, gflop=0.0)
        else:
            self._phase = replace(self._later[place], images=images)
            del self._later[: place + 1]
        self._done_images, self._began_s = 0, self._clock()

    def advance(self, images: int) -> None:
        self._done_images += images

    @property
    def share(self) -> float:
        """The share of all work that is done."""
        done = self._past_work + self._done_work
        total = done + self._left_work + sum(phase.work for phase in self._later)
        return done / total if total else 0.0

    def seconds(self) -> float | None:
        """Return the time left; None while there is no speed to judge by."""
        done, spent_s = self._past_work + self._done_work, self._past_s + self._elapsed_s
        if not done or spent_s <= 0:
            return None
        a_gflop_s = spent_s / done
        here_s = self._left_work * a_gflop_s
        if self._done_images:
            left = max(0, self._phase.images - self._done_images)
            here_s = self._elapsed_s / self._done_images * left
        return here_s + a_gflop_s * sum(phase.work for phase in self._later)

    @property
    def _elapsed_s(self) -> float:
        """The time of this phase, if it counts as work."""
        return self._clock() - self._began_s if self._phase.work else 0.0

    @property
    def _done_work(self) -> float:
        return self._done_images * self._phase.gflop

    @property
    def _left_work(self) -> float:
        return max(0.0, self._phase.work - self._done_work)


_SECONDS_BETWEEN_LINES = 5.0
_PARTS_OF_A_BAR = 1000


class Phase(Protocol):
    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        """Count `images` more as done. Loss and accuracy are those of the latest batch."""


class Progress(Protocol):
    def note(self, text: str) -> None:
        """Tell the user one sentence."""

    def whole(self, expected: Sequence[ExpectedPhase]) -> AbstractContextManager[None]:
        """Begin a run of several phases, and tell its whole time left as well."""

    def phase(self, name: str, *, total: int) -> AbstractContextManager[Phase]:
        """Begin a part of the run that handles `total` images; 0: one that counts no images."""


def show_progress(stream: TextIO | None = None) -> Progress:
    """Choose bars for a terminal, and plain lines for anything else."""
    chosen = sys.stderr if stream is None else stream
    return Bars() if chosen.isatty() else ProgressLines(chosen)


class Silent:
    """No progress: the first of several processes speaks for all of them."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        yield

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        yield self

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        pass


class ProgressLines:
    """Progress as lines: one when a phase ends, and one every few seconds while it runs."""

    def __init__(self, stream: TextIO, *, every_s: float = _SECONDS_BETWEEN_LINES) -> None:
        self._stream = stream
        self._every_s = every_s
        self._all: TimeLeft | None = None

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        self._all = TimeLeft(expected)
        try:
            yield
        finally:
            self._all = None

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        all_phases = self._all or TimeLeft(())
        all_phases.begin(name, images=total)
        phase = _LinesPhase(
            self, name=name, total=total, every_s=self._every_s, all_phases=all_phases
        )
        yield phase
        phase.say()


class _LinesPhase:
    def __init__(
        self, lines: ProgressLines, *, name: str, total: int, every_s: float, all_phases: TimeLeft
    ) -> None:
        self._lines, self._name, self._total, self._every_s = lines, name, total, every_s
        self._all = all_phases
        self._done = 0
        self._figures = ""
        self._started = self._spoke = time.monotonic()

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._done += images
        self._all.advance(images)
        self._figures = figures(loss=loss, accuracy=accuracy)
        if time.monotonic() - self._spoke >= self._every_s:
            self.say()

    def say(self) -> None:
        self._spoke = time.monotonic()
        elapsed_s = max(self._spoke - self._started, 1e-9)
        if not self._total:
            self._lines.note(f"{self._name}: {elapsed_s:.1f} s")
            return
        rate = self._done / elapsed_s
        left_s = (self._total - self._done) / rate if self._done else 0.0
        share = f"{self._done}/{self._total}"
        when = f"{left_s:.0f} s left" if self._done < self._total else f"{elapsed_s:.1f} s"
        when += self._in_all(left_s)
        self._lines.note(f"{self._name}: {share}{self._figures}, {rate:.0f} images/s, {when}")

    def _in_all(self, left_s: float) -> str:
        """Tell the time left in the whole run, if more than this phase is left."""
        all_s = self._all.seconds()
        if all_s is None or round(all_s) <= round(left_s):
            return ""
        return f", {all_s:.0f} s left in all"


class Bars:
    """Progress as one bar, drawn by rich: of the whole run, or of a phase that stands alone."""

    def __init__(self) -> None:
        # Imported here: a run without a terminal starts faster without rich.
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: _Bar | None = None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        with self._shown() as bars:
            self._bar = _Bar(bars, TimeLeft(expected))
            try:
                yield
                self._bar.fill()
            finally:
                self._bar = None

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        if self._bar is not None:
            yield self._bar.begin(name, total=total)
            return
        alone = ExpectedPhase(name=name, images=total, gflop=1.0)
        with self._shown() as bars:
            yield _Bar(bars, TimeLeft([alone])).begin(name, total=total)

    def _shown(self) -> Any:
        from rich import progress as bars

        return bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[figures]}", markup=False),
            bars.TextColumn("{task.fields[left]}", markup=False),
            bars.TimeElapsedColumn(),
            console=self._console,
        )


class _Bar:
    """A bar of the share of all work. A phase without images shows its name and no figures."""

    def __init__(self, bars: Any, all_phases: TimeLeft) -> None:
        self._bars, self._all = bars, all_phases
        self._task = bars.add_task("beginning", total=_PARTS_OF_A_BAR, figures="", left="")
        self._done = 0
        self._started = time.monotonic()

    def begin(self, name: str, *, total: int) -> Phase:
        self._all.begin(name, images=total)
        self._done, self._started = 0, time.monotonic()
        self._show(description=name, figures="")
        return self

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._done += images
        self._all.advance(images)
        rate = self._done / max(time.monotonic() - self._started, 1e-9)
        shown = f"{rate:.0f} images/s{figures(loss=loss, accuracy=accuracy)}"
        self._show(figures=shown)

    def fill(self) -> None:
        self._bars.update(self._task, completed=_PARTS_OF_A_BAR, figures="", left="")

    def _show(self, **texts: str) -> None:
        left_s = self._all.seconds()
        left = "" if left_s is None else f"{clock(left_s)} left"
        self._bars.update(
            self._task, completed=round(_PARTS_OF_A_BAR * self._all.share), left=left, **texts
        )


def clock(seconds: float) -> str:
    """Write seconds as a clock shows them: 0:05, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def figures(*, loss: float | None, accuracy: float | None) -> str:
    said = "" if loss is None else f", loss {loss:.3f}"
    return said if accuracy is None else f"{said}, accuracy {percent(accuracy)}"
