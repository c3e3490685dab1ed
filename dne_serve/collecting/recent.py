"""Hold the last pictures that were answered, so that feedback can still have them kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dne_serve.collecting.candidate import Candidate

MAX_BYTES = 32 << 20
MAX_COUNT = 4096


class Recent:
    """Candidates by id. The oldest go when they are too many or too large. Thread-safe."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_count: int = MAX_COUNT) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._bytes = 0
        self._held: OrderedDict[str, Candidate] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, candidate: Candidate) -> None:
        """Hold a candidate, in place of one with the same id."""
        with self._lock:
            before = self._held.pop(candidate.id, None)
            self._bytes += candidate.nbytes - (before.nbytes if before else 0)
            self._held[candidate.id] = candidate
            while self._bytes > self._max_bytes or len(self._held) > self._max_count:
                self._bytes -= self._held.popitem(last=False)[1].nbytes

    def get(self, item: str) -> Candidate | None:
        with self._lock:
            return self._held.get(item)

    def drop(self, item: str) -> None:
        """Forget a candidate whose item was deleted."""
        with self._lock:
            gone = self._held.pop(item, None)
            self._bytes -= gone.nbytes if gone else 0

    def __len__(self) -> int:
        return len(self._held)
