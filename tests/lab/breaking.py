"""Break off a run in the middle of a phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.progress import ExpectedPhase, Phase


class Broken(Exception):
    """The run is killed here."""


class Silent:
    """Progress that tells nothing, and breaks in the middle of a phase if asked to."""

    def __init__(self, *, breaks_in: str = "", on_task: int = 0) -> None:
        self._breaks_in, self._on_task = breaks_in, on_task
        self._task, self._phase, self._left = "", "", 0

    def note(self, text: str) -> None:
        self._task = text if ": task " in text else self._task

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        yield

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        self._phase, self._left = name, total // 2
        yield self

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._left -= images
        here = self._phase == self._breaks_in and f"task {self._on_task} of" in self._task
        if here and self._left < 0:
            raise Broken(self._phase)
