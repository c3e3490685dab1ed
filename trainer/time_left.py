"""Estimate the time until a run is over, from the operations of its phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


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
        names = [one.name for one in self._later]
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
        total = done + self._left_work + sum(one.work for one in self._later)
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
        return here_s + a_gflop_s * sum(one.work for one in self._later)

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
