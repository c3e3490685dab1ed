"""How an engine shares its threads among batches that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_store.machine import usable_cores

USUAL_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """A lone image has all `threads`; a batch has a worker's share of them. Threads that wait for
    each other lose much where anything else uses the processor, and one thread waits for nobody;
    but a lone image is answered sooner by many."""

    threads: int
    workers: int

    @classmethod
    def of(cls, *, threads: int | None, workers: int | None) -> ThreadPlan:
        """What was asked for, or by the cores that this process may use."""
        all_of_them = threads or usable_cores()
        return cls(threads=all_of_them, workers=workers or min(USUAL_WORKERS, all_of_them))

    @property
    def share(self) -> int:
        return max(1, self.threads // self.workers)


@dataclass(slots=True)
class UnderWay:
    """How many passes are being run."""

    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """A pass; whether it has begun alone."""
        with self._lock:
            self._count += 1
            alone = self._count == 1
        try:
            yield alone
        finally:
            with self._lock:
                self._count -= 1
