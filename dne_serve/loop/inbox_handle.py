"""Open the inbox of the served store, with one index for the whole server, and sweep it.

A sweep deletes items whose time is over, by the clock of the store, and never many at once. A wrong
clock makes every item look old. So the first sweep that finds a large share of the inbox overdue
deletes nothing, and each later one deletes a small share. The log warns each time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from model_store.loop.inbox import Inbox
from model_store.loop.index import Index
from model_store.loop.item_names import CORRECTIONS
from model_store.loop.items import delete_items, delete_leftovers, overdue
from model_store.loop.waiting import WaitingLabels, find_waiting
from model_store.records.gc_marks import clock_s
from model_store.store.reserve import free_bytes
from model_store.store.store import Store

SWEEP_S = 3600.0
_MOST_SHARE = 0.1
"""The largest share of the inbox that one sweep deletes; at least one item."""

log = logging.getLogger("dne_serve.loop")


class InboxHandle:
    """The inbox, its index, and the labels that wait. The store may be created after the server
    starts. Thread-safe."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._waiting_lock = threading.Lock()
        self._waiting_key: object = None
        self._waiting = WaitingLabels()

    @property
    def inbox(self) -> Inbox:
        """Open the inbox. Raise StoreNotFound if there is no store yet."""
        return Inbox(self._open_store().objects)

    @property
    def free_bytes(self) -> int | None:
        """Return the free space on the disk of the store; None if the store is not on a disk."""
        return free_bytes(self._open_store().objects)

    @property
    def index(self) -> Index:
        """Return the index, which is empty until it is refreshed."""
        inbox = self.inbox
        with self._lock:
            if self._index is None:
                self._index = Index(inbox)
            return self._index

    def waiting_labels(self, store: Store, *, channel: str) -> WaitingLabels:
        """Find the labels that wait for the next version of a channel.

        They depend on the channel's head, on the newest label record of each item and on the
        corrections. All are known by names, so records are read again only after a change.
        """
        index = self.index
        index.refresh()
        head = store.head(channel)
        rows = frozenset((row.id, row.number) for row in index.rows(["labelled"]))
        corrections = tuple(store.objects.list_names(CORRECTIONS))
        key = (channel, head.number if head else 0, index.unread, rows, corrections)
        with self._waiting_lock:
            if key != self._waiting_key:
                manifest = store.resolve(head) if head else None
                self._waiting = find_waiting(store, index, head=manifest)
                self._waiting_key = key
            return self._waiting


class Retention:
    """Sweeps the inbox of one server. Not thread-safe."""

    def __init__(self, *, days: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._days = days
        self._clock = clock
        self._sweep_at = 0.0
        self._has_warned = False

    def sweep(self, inbox: Inbox, index: Index) -> None:
        """Delete overdue items, at most once an hour."""
        if self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + SWEEP_S
        now = datetime.fromtimestamp(clock_s(inbox.objects), UTC)
        old = overdue(inbox, index, days=self._days, now=now)
        most = max(1, math.ceil(_MOST_SHARE * len(index)))
        if len(old) > most:
            most = self._warned(len(old), of=len(index), most=most, now=now)
        else:
            self._has_warned = False
            delete_leftovers(inbox, index, days=self._days, now=now)
        gone = old[:most]
        delete_items(inbox, index, gone)
        if gone:
            log.info("%s items of the inbox were deleted because their time is over", len(gone))

    def _warned(self, overdue: int, *, of: int, most: int, now: datetime) -> int:
        """Warn of a large share, and return the number of items that may be deleted now."""
        allowed = most if self._has_warned else 0
        self._has_warned = True
        log.warning(
            "%s of %s items of the inbox are overdue at once by the clock of the store, which says "
            "%s: %s are deleted now, and %s an hour from now on; if the clock is wrong, stop the "
            "server and set it",
            overdue,
            of,
            f"{now:%Y-%m-%d %H:%M}",
            allowed,
            most,
        )
        return allowed
