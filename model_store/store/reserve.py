"""Hold back room on the disk, so that housekeeping can begin and channels move when it is full.

Housekeeping writes a record before it deletes: a tombstone, a mark, a verdict. A rollback writes a
channel record. On a full disk they delete the reserve to make room for the first record, and make
the reserve again at the end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.errors import OutcomeUnknown, StoreError, WriteFailed
from model_store.layout import RESERVE

RESERVE_BYTES = 256 << 10
RESERVE_NAME = f"{RESERVE}/room"


Others = Callable[[], Iterable[Objects]]
"""Returns the backends of a store's alternates. Those on its disk share their reserve with it."""


def hold_back(objects: Objects, others: Others = tuple) -> None:
    """Make the reserve of a directory unless it is there, or an alternate on that disk has one.
    Object storage needs none. A reserve that cannot be made is not an error."""
    if isinstance(objects, LocalDirectory) and not objects.list_names(RESERVE):
        if any(other.list_names(RESERVE) for other in _beside(objects, others)):
            return
        with suppress(StoreError):
            # Random: a file system that compresses holds nothing back for zeros.
            objects.create(RESERVE_NAME, os.urandom(RESERVE_BYTES))


def _beside(objects: LocalDirectory, others: Others) -> Iterator[LocalDirectory]:
    """Yield the directories among others that are on the same disk."""
    for other in others():
        with suppress(OSError):
            if isinstance(other, LocalDirectory) and _disk(other) == _disk(objects):
                yield other


def _disk(objects: LocalDirectory) -> int:
    return os.stat(objects.root).st_dev


def free_bytes(objects: Objects) -> int | None:
    """Return the free room on the disk of a directory; None for object storage."""
    if not isinstance(objects, LocalDirectory):
        return None
    try:
        disk = os.statvfs(objects.root)
    except OSError as error:
        raise StoreError(
            f"the free room on the disk of the store is unknown: {error.strerror}"
        ) from error
    return disk.f_bavail * disk.f_frsize


def is_full(error: BaseException) -> bool:
    """Return whether a write failed for want of room. A write with an unknown outcome did not."""
    cause = error.__cause__
    if isinstance(error, OutcomeUnknown) or not isinstance(cause, OSError):
        return False
    return cause.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def using_reserve(objects: Objects, others: Others = tuple) -> Iterator[Objects]:
    """Yield the objects for small records: on a full disk, writes give up the reserve."""
    held = [objects]
    try:
        yield cast(Objects, _Reserved(objects, others, held))
    except WriteFailed as error:
        if not is_full(error):
            raise
        raise WriteFailed(
            f"{error}; nothing is left to make room with: remove a file of some KiB from that "
            "disk that is not the store's, and run it again"
        ) from error.__cause__
    finally:
        for one in reversed(held):  # the reserve that was given up comes first
            hold_back(one, others)


class _Reserved:
    """Pass everything on. A write that finds the disk full is tried again without the reserve."""

    def __init__(self, objects: Objects, others: Others, held: list[Objects]) -> None:
        """`held`: the directories whose reserves there are to be again; more may be added."""
        self._objects = objects
        self._others = others
        self._held = held

    def create(self, name: str, data: bytes) -> bool:
        try:
            return self._objects.create(name, data)
        except WriteFailed as error:
            holder = self._holder() if is_full(error) else None
            if holder is None:
                raise
        holder.delete(RESERVE_NAME)
        return self._objects.create(name, data)

    def _holder(self) -> Objects | None:
        """Find a directory on this disk with a reserve: this one, or an alternate."""
        if self._objects.list_names(RESERVE):
            return self._objects
        if isinstance(self._objects, LocalDirectory):
            for other in _beside(self._objects, self._others):
                if other.list_names(RESERVE):
                    self._held.append(other)
                    return other
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)
