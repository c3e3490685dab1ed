"""Run processes in simulated time. Knows nothing of buckets and replicas.

A process is a generator that yields waits. A wait is a function that gets the rest of the process
and calls it when the wait is over.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from functools import partial

Resume = Callable[[], None]
Wait = Callable[[Resume], None]
Process = Generator[Wait, None, None]


class Events:
    """A clock that jumps from one event to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Resume]] = []
        self._order = itertools.count()

    def at(self, time_s: float, resume: Resume) -> None:
        heapq.heappush(self._due, (time_s, next(self._order), resume))

    def sleep(self, seconds: float) -> Wait:
        return partial(self.at, self.now_s + seconds)

    def begin(self, process: Process) -> None:
        """Run a process until its next wait, now and after each wait."""
        try:
            wait = next(process)
        except StopIteration:
            return
        wait(lambda: self.begin(process))

    def run(self) -> None:
        """Jump from event to event until none is left."""
        while self._due:
            self.now_s, _, resume = heapq.heappop(self._due)
            resume()


class Link:
    """A link that its transfers share evenly, each of them with at most `each_bytes_per_s`."""

    def __init__(self, events: Events, *, bytes_per_s: float, each_bytes_per_s: float) -> None:
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._each_bytes_per_s = each_bytes_per_s
        self._under_way: list[tuple[float, int, Resume]] = []
        self._order = itertools.count()
        self._plan = 0
        self._each_so_far = 0.0
        """Bytes that a transfer has had that was under way from the beginning."""
        self._updated_s = 0.0
        self.bytes = 0
        self.peak_bytes_per_s = 0.0

    def transfer(self, size: int) -> Wait:
        return partial(self._begin, size)

    def _begin(self, size: int, resume: Resume) -> None:
        self._update()
        self.bytes += size
        heapq.heappush(self._under_way, (self._each_so_far + size, next(self._order), resume))
        self.peak_bytes_per_s = max(self.peak_bytes_per_s, self._speed() * len(self._under_way))
        self._plan_end()

    def _speed(self) -> float:
        return min(self._each_bytes_per_s, self._bytes_per_s / len(self._under_way))

    def _update(self) -> None:
        if self._under_way:
            self._each_so_far += self._speed() * (self._events.now_s - self._updated_s)
        self._updated_s = self._events.now_s

    def _plan_end(self) -> None:
        self._plan += 1
        if self._under_way:
            left = max(0.0, self._under_way[0][0] - self._each_so_far)
            end_s = self._events.now_s + left / self._speed()
            self._events.at(end_s, partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return  # another transfer has changed the speed since
        self._update()
        end, _, resume = heapq.heappop(self._under_way)
        self._each_so_far = max(self._each_so_far, end)
        self._plan_end()
        resume()


class Slots:
    """Places that are taken and given back. A process waits in a queue for one."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._free: deque[str] = deque()
        self._waiting: deque[Resume] = deque()

    def add(self, slot: str) -> None:
        self._free.append(slot)
        if self._waiting:
            self._events.at(self._events.now_s, self._waiting.popleft())

    def wait(self, resume: Resume) -> None:
        """Wait until a place is free, which is not taken yet."""
        if self._free:
            resume()
        else:
            self._waiting.append(resume)

    def take(self) -> str | None:
        """Take a place; None if another process was faster."""
        return self._free.popleft() if self._free else None
