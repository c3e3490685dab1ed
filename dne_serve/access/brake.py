"""Let a number of events of a kind pass in each minute, and count the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

MOST = 20
WINDOW_S = 60.0


class Brake:
    """Limit on the events of each kind in a window of time."""

    def __init__(
        self,
        *,
        most: int = MOST,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window_s = window_s
        self._most = most
        self._clock = clock
        self._began = clock()
        self._seen: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()

    def admits(self, kind: int) -> bool:
        self._begin_anew_if(self._clock() >= self._began + self.window_s)
        self._seen[kind] += 1
        return self._seen[kind] <= self._most

    def take_left_out(self, *, also_now: bool = False) -> dict[int, int]:
        """Return once how many events of each kind were left out in past minutes; with `also_now`
        those of the current minute as well."""
        self._begin_anew_if(also_now or self._clock() >= self._began + self.window_s)
        taken, self._left_out = dict(self._left_out), Counter()
        return taken

    def _begin_anew_if(self, is_over: bool) -> None:
        if is_over:
            for kind, seen in self._seen.items():
                if seen > self._most:
                    self._left_out[kind] += seen - self._most
            self._began, self._seen = self._clock(), Counter()
