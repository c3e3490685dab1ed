"""Share the threads of an engine among batches that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_store.machine import usable_cores

USUAL_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """All `threads` for a lone image, and a worker's share of them for a batch. Threads that wait
    for each other lose much where another program uses the processor; a lone image is answered
    sooner by many threads."""

    threads: int
    workers: int

    @classmethod
    def of(cls, *, threads: int | None, workers: int | None) -> ThreadPlan:
        """Plan with the given numbers, or by the cores that this process may use."""
        all_of_them = threads or usable_cores()
        return cls(threads=all_of_them, workers=workers or min(USUAL_WORKERS, all_of_them))

    @property
    def share(self) -> int:
        return max(1, self.threads // self.workers)


@dataclass(slots=True)
class UnderWay:
    """A count of the passes under way."""

    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Count a pass, and tell whether it has begun alone."""
        with self._lock:
            self._count += 1
            alone = self._count == 1
        try:
            yield alone
        finally:
            with self._lock:
                self._count -= 1
