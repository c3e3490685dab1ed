"""Make rows about versions for lists and pages, and read no manifest twice.

A row is kept under the listing's entry of its manifest, which never changes. Rows are for display
alone: nothing is served, trained or deleted because of a row.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model_store.backends.base import Entry
from model_store.errors import StoreError
from model_store.records.manifest import Manifest
from model_store.records.tombstone import read_deleted
from model_store.store.store import Store

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
            value = self._held.get(key)
            if value is not None:
                self._held.move_to_end(key)
            return value

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


_RECENT_MANIFESTS = 32  # a version's parent is mostly the one before it

Row = dict[str, Any]
Describe = Callable[[Manifest, Manifest | None], Row]
"""Make the row of a version from its manifest and from that of its nearest living ancestor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The rows of some versions, ascending. The row of an unreadable version is its error.
    `next_before` is the `before` of the page with older versions; None where there are none."""

    rows: list[tuple[int, Row | StoreError]]
    total: int
    next_before: int | None

    @property
    def problems(self) -> Iterator[StoreError]:
        return (row for _, row in self.rows if isinstance(row, StoreError))


def read_page(
    store: Store, *, describe: Describe, keep: Keep, before: int | None, limit: int | None
) -> Page:
    """Read the newest `limit` versions with a number below `before`; None leaves either out."""
    living = store.versions()
    numbers = [number for number in living if before is None or number < before]
    chosen = numbers if limit is None else numbers[-limit:]
    entries = store.version_entries(since=chosen[0]) if chosen else {}
    reader = _Reader(store, living=frozenset(living), describe=describe, keep=keep)
    return Page(
        # A version in the first listing alone was deleted in between.
        rows=[(n, reader.row(n, entries[n])) for n in chosen if n in entries],
        total=len(living),
        next_before=chosen[0] if len(chosen) < len(numbers) else None,
    )


class _Reader:
    def __init__(
        self, store: Store, *, living: frozenset[int], describe: Describe, keep: Keep
    ) -> None:
        self._store = store
        self._living = living
        self._describe = describe
        self._keep = keep
        self._recent: dict[int, Manifest] = {}

    def row(self, number: int, entry: Entry) -> Row | StoreError:
        key = key_of(self._store, entry)
        kept = self._keep.get(key)
        if kept is not None:
            parts = json.loads(kept)
            if _still_holds(parts["parent"], parts["base"], living=self._living):
                row: Row = parts["row"]
                return row
        try:
            manifest = self._manifest(number)
        except StoreError as error:
            return error
        return self._fresh(key, manifest)

    def _fresh(self, key: Key, manifest: Manifest) -> Row:
        try:
            base = self._base(manifest)
        except StoreError:
            return self._describe(manifest, None)  # not kept: the ancestor may be mended
        row = self._describe(manifest, base)
        parts = {"parent": manifest.parent, "base": base and base.version, "row": row}
        self._keep.put(key, json.dumps(parts, allow_nan=False, separators=(",", ":")).encode())
        return row

    def _base(self, manifest: Manifest) -> Manifest | None:
        """Find the nearest ancestor that was not deleted, as `Store.parent_of` does."""
        number = manifest.parent
        while number is not None and number not in self._living:
            tombstone = read_deleted(self._store.objects, number)
            number = tombstone.parent if tombstone else None
        return None if number is None else self._manifest(number)

    def _manifest(self, number: int) -> Manifest:
        manifest = self._recent.get(number)
        if manifest is None:
            manifest = self._store.manifest(number)
            self._recent[number] = manifest
            if len(self._recent) > _RECENT_MANIFESTS:
                del self._recent[next(iter(self._recent))]
        return manifest


def key_of(store: Store, entry: Entry) -> Key:
    """Make the key for bytes that are made from an object."""
    return Key(store.id, entry.name, entry.bytes, entry.modified_s)


def _still_holds(parent: int | None, base: int | None, *, living: Collection[int]) -> bool:
    """Return whether `base` is still the nearest living ancestor of a child of `parent`: versions
    are deleted, and never come back."""
    if parent is None or parent in living:
        return base == parent
    return base is None or base in living
