"""Keep bytes in memory under what a listing tells of the object that they were made from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

MAX_KEPT_BYTES = 32 << 20


class Key(NamedTuple):
    """The store, name, size and time of an immutable object in a listing."""

    store: str
    name: str
    bytes: int
    modified_s: float


class Keep:
    """Bytes under keys. The ones used longest ago go when there are too many. Thread-safe."""

    def __init__(self, *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> bytes | None:
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: Key, value: bytes) -> None:
        with self._lock:
            self._bytes += len(value) - len(self._held.pop(key, b""))
            self._held[key] = value
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._held.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._held)

    def items(self) -> list[tuple[Key, bytes]]:
        """List everything that is held, beginning with the bytes used longest ago."""
        with self._lock:
            return list(self._held.items())
