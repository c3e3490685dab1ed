"""Show the progress of a run: notes, and phases with loss, accuracy, images/s and time left.

Write to stderr only: stdout is for answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from model_store.tables import percent

SECONDS_BETWEEN_LINES = 5.0


class Phase(Protocol):
    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        """Count `images` more as done. Loss and accuracy are those of the latest batch."""


class Progress(Protocol):
    def note(self, text: str) -> None:
        """Tell the user one sentence."""

    def phase(self, name: str, *, total: int) -> AbstractContextManager[Phase]:
        """Begin a part of the run that handles `total` images."""


def show_progress(stream: TextIO | None = None) -> Progress:
    """Choose bars for a terminal, and plain lines for anything else."""
    chosen = sys.stderr if stream is None else stream
    return Bars() if chosen.isatty() else Lines(chosen)


class Silent:
    """No progress: the first of several processes speaks for all of them."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        yield self

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        pass


class Lines:
    """Progress as lines: one when a phase ends, and one every few seconds while it runs."""

    def __init__(self, stream: TextIO, *, every_s: float = SECONDS_BETWEEN_LINES) -> None:
        self._stream = stream
        self._every_s = every_s

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        phase = _LinesPhase(self, name=name, total=total, every_s=self._every_s)
        yield phase
        phase.say()


class _LinesPhase:
    def __init__(self, lines: Lines, *, name: str, total: int, every_s: float) -> None:
        self._lines, self._name, self._total, self._every_s = lines, name, total, every_s
        self._done = 0
        self._figures = ""
        self._started = self._spoke = time.monotonic()

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._done += images
        self._figures = figures(loss=loss, accuracy=accuracy)
        if time.monotonic() - self._spoke >= self._every_s:
            self.say()

    def say(self) -> None:
        self._spoke = time.monotonic()
        elapsed_s = max(self._spoke - self._started, 1e-9)
        rate = self._done / elapsed_s
        left_s = (self._total - self._done) / rate if self._done else 0.0
        share = f"{self._done}/{self._total}"
        when = f"{left_s:.0f} s left" if self._done < self._total else f"{elapsed_s:.1f} s"
        self._lines.note(f"{self._name}: {share}{self._figures}, {rate:.0f} images/s, {when}")


class Bars:
    """Progress as a bar for each phase, drawn by rich."""

    def __init__(self) -> None:
        # Imported here: a run without a terminal starts faster without rich.
        from rich.console import Console

        self._console = Console(stderr=True)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.fields[figures]}", markup=False),
            bars.TextColumn("{task.fields[rate]}", markup=False),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self._console) as shown:
            task = shown.add_task(name, total=total, figures="", rate="")
            yield _BarsPhase(shown, task)


class _BarsPhase:
    def __init__(self, shown: object, task: int) -> None:
        self._shown, self._task = shown, task
        self._done = 0
        self._started = time.monotonic()

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._done += images
        rate = self._done / max(time.monotonic() - self._started, 1e-9)
        self._shown.update(  # type: ignore[attr-defined]
            self._task,
            advance=images,
            figures=figures(loss=loss, accuracy=accuracy).removeprefix(", "),
            rate=f"{rate:.0f} images/s",
        )


def figures(*, loss: float | None, accuracy: float | None) -> str:
    said = "" if loss is None else f", loss {loss:.3f}"
    return said if accuracy is None else f"{said}, accuracy {percent(accuracy)}"
