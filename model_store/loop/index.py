"""Keep the names of all items in memory, sorted, with the state of each.

The index is built from two listings, and reads no item record. A row takes about 140 bytes. A
refresh reads only the newest names; from time to time a whole listing finds deletions, and labels
that other processes wrote.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Literal

from model_store.backends.base import parsed
from model_store.errors import StoreError, WrongUsage
from model_store.loop.item_names import (
    LABELS,
    MILLE,
    NOT_KNOWN,
    PICTURES,
    Facts,
    days_since,
    facts_of,
    ids_before,
    is_id,
    label_of,
    short_of,
)

if TYPE_CHECKING:
    from model_store.loop.inbox import Inbox
    from model_store.records.inbox import LabelRecord

Order = Literal["newest", "uncertain", "unknown", "disagreeing"]
State = Literal["unlabelled", "labelled", "wrong", "discarded"]
STATES: tuple[State, ...] = ("unlabelled", "labelled", "wrong", "discarded")
STATE_OF: dict[str, State] = {
    "label": "labelled",
    "wrong": "wrong",
    "discard": "discarded",
    "clear": "unlabelled",
}
NOT_READ = len(STATES)
"""The state of an item with a label record that nobody has read yet."""
READERS = 16
_READ_S = 0.3
"""Time that one refresh may take to read label records. The next refresh reads the rest."""
_LATE = timedelta(minutes=15)
"""An item may be written this long after the time in its id."""
LOOK_S = 2.0
WHOLE_S = 15.0
_WHOLE_SHARE = 20
"""A whole listing is made again after this many times the time that it took."""
ID_LENGTH = 31
SCORE, UNKNOWN, FLAGS, HASH = slice(32, 36), slice(37, 41), 42, slice(-20, -4)
"""Places of the facts in the last part of a picture's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRow:
    """An item of the index. `number` is that of its newest label record; 0 for none."""

    facts: Facts
    number: int
    state: State

    @property
    def id(self) -> str:
        return self.facts.id


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPage:
    """Some items in order. `next_cursor` is the cursor of the next page; None at the end."""

    rows: tuple[ItemRow, ...]
    next_cursor: str | None


class Index:
    """All items of an inbox. Safe to use from several threads."""

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._inbox = inbox
        self._clock = clock
        self._looking = threading.Lock()
        """Held while the store is asked, which may take long."""
        self._lock = threading.RLock()
        """Held while rows are read or changed."""
        self._is_built = False
        self._changed: dict[str, str | None] = {}
        """Items that were added, or deleted (None), since the listing under way began."""
        self._names: list[str] = []
        self._numbers = array("I")
        self._states = bytearray()
        self._orders: dict[Order, array[int]] = {}
        self._look_at = 0.0
        self._list_at = 0.0

    def refresh(self, *, whole: bool = False) -> None:
        """Look for changes, unless the last look was a moment ago. If another thread is looking,
        return at once, provided that the index was built before."""
        if not self._looking.acquire(blocking=whole or not self._is_built):
            return
        try:
            now = self._clock()
            if whole or now >= self._list_at:
                self._list_all()
                self._list_at = now + max(WHOLE_S, _WHOLE_SHARE * (self._clock() - now))
                self._look_at = self._clock() + LOOK_S
            elif now >= self._look_at:
                self._list_new()
                self._look_at = self._clock() + LOOK_S
            self._is_built = True
            self._read_states()
        finally:
            self._looking.release()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def unread(self) -> int:
        """Count the items with a label record that has not been read yet."""
        return self._states.count(NOT_READ)

    def counts(self) -> dict[State, int]:
        """Count the items in each state. Count an item with an unread label record as labelled."""
        with self._lock:
            counts = {state: self._states.count(code) for code, state in enumerate(STATES)}
            counts["labelled"] += self._states.count(NOT_READ)
        return counts

    def find(self, item: str) -> ItemRow | None:
        with self._lock:
            place = self._place(item)
            return None if place is None else self._row(place)

    def page(
        self,
        *,
        order: Order = "newest",
        states: Iterable[State] = STATES,
        cursor: str | None = None,
        limit: int,
    ) -> ItemPage:
        """Return the items after `cursor` that are in one of the states."""
        with self._lock:
            places = self._ordered(order)
            start = 0 if cursor is None else self._start(order, places, cursor)
            codes = self._codes(states)
            wanted = (place for place in places[start:] if self._states[place] in codes)
            matching = list(islice(wanted, limit + 1))
            rows = tuple(self._row(place) for place in matching[:limit])
            last = matching[limit - 1] if len(matching) > limit else None
            follow = None if last is None else f"{self._fact(order, last)}~{rows[-1].id}"
        return ItemPage(rows=rows, next_cursor=follow)

    def rows(self, states: Iterable[State] = STATES) -> list[ItemRow]:
        """List all items in some states, newest first."""
        with self._lock:
            codes = self._codes(states)
            return [
                self._row(place)
                for place in range(len(self._names) - 1, -1, -1)
                if self._states[place] in codes
            ]

    def waiting(self, number: int) -> str | None:
        """Return the id of the item that comes `number`-th, from the oldest, among those without a
        label; None if fewer wait."""
        with self._lock:
            places = (place for place, code in enumerate(self._states) if code == 0)
            place = next(islice(places, number - 1, None), None)
            return None if place is None else self._names[place][:ID_LENGTH]

    def waiting_hashes(self) -> array[int]:
        """List the perceptual hashes of all items without a label."""
        with self._lock:
            waiting = (place for place, code in enumerate(self._states) if code == 0)
            return array("Q", (int(self._names[place][HASH], 16) for place in waiting))

    def with_hash(self, dhash: int) -> list[ItemRow]:
        """List the items whose picture has this perceptual hash."""
        text = f"{dhash:016x}"
        with self._lock:
            return [
                self._row(place) for place, name in enumerate(self._names) if name[HASH] == text
            ]

    def older_than(self, moment: datetime) -> list[ItemRow]:
        """List the items with an id from before a moment, oldest first."""
        with self._lock:
            return [self._row(n) for n in range(bisect_left(self._names, ids_before(moment)))]

    def added(self, short: str) -> None:
        """Note an item that this process has added."""
        with self._lock:
            self._changed[short[:ID_LENGTH]] = short
            self._merge([short])

    def judged(self, record: LabelRecord) -> None:
        """Note a label record that this process has written or read."""
        with self._lock:
            place = self._place(record.item)
            if place is not None and record.number >= self._numbers[place]:
                self._numbers[place] = record.number
                self._states[place] = STATES.index(STATE_OF[record.kind])

    def deleted(self, item: str) -> None:
        """Note an item that was deleted."""
        with self._lock:
            self._changed[item] = None
            place = self._place(item)
            if place is not None:
                del self._names[place], self._numbers[place], self._states[place]
                self._orders.clear()

    def _list_all(self) -> None:
        objects = self._inbox.objects
        with self._lock:
            self._changed.clear()
        names = sorted(parsed(objects.list_names(PICTURES), short_of))
        with self._lock:
            names = self._with_changes(names)
            if names != self._names:
                self._replace(names)
        labels = objects.list_names(LABELS)
        with self._lock:
            self._note_labels(labels)

    def _with_changes(self, names: list[str]) -> list[str]:
        """Add items that came while a listing was made, and take out those that were deleted."""
        if not self._changed:
            return names
        left = {name for name in names if name[:ID_LENGTH] not in self._changed}
        return sorted(left | {name for name in self._changed.values() if name is not None})

    def _list_new(self) -> None:
        now = datetime.now(UTC)
        since = ids_before(now - _LATE)
        new: list[str] = []
        for day in days_since(since, now=now):
            folder = f"{PICTURES}/{day}"
            entries = self._inbox.objects.list(folder, after=f"{folder}/{since}")
            new += parsed((entry.name for entry in entries), short_of)
        with self._lock:
            gone = {item for item, short in self._changed.items() if short is None}
            self._merge(name for name in new if name[:ID_LENGTH] not in gone)

    def _merge(self, shorts: Iterable[str]) -> None:
        for name in set(shorts):
            if self._place(name[:ID_LENGTH]) is None:
                place = bisect_left(self._names, name)
                self._names.insert(place, name)
                self._numbers.insert(place, 0)
                self._states.insert(place, 0)
                self._orders.clear()

    def _replace(self, names: list[str]) -> None:
        """Take new names, and keep the numbers and states of those that were there before."""
        numbers, states = array("I", bytes(4 * len(names))), bytearray(len(names))
        old = 0
        for place, name in enumerate(names):
            while old < len(self._names) and self._names[old] < name:
                old += 1
            if old < len(self._names) and self._names[old] == name:
                numbers[place], states[place] = self._numbers[old], self._states[old]
        self._names, self._numbers, self._states = names, numbers, states
        self._orders.clear()

    def _note_labels(self, names: Iterable[str]) -> None:
        for name in names:
            item, number = label_of(name) or ("", 0)
            place = self._place(item) if number else None
            if place is not None and number > self._numbers[place]:
                self._numbers[place] = number
                self._states[place] = NOT_READ

    def _read_states(self) -> None:
        """Read label records that were not read yet, as many as the time allows."""
        until = self._clock() + _READ_S
        with self._lock:
            if NOT_READ not in self._states:
                return
            waiting = [
                (self._names[place][:ID_LENGTH], self._numbers[place])
                for place, code in enumerate(self._states)
                if code == NOT_READ
            ]
        with ThreadPoolExecutor(READERS, "inbox") as readers:
            while waiting:  # the newest first
                batch, waiting = waiting[-4 * READERS :], waiting[: -4 * READERS]
                for record in readers.map(self._read_head, batch):
                    if record is not None:
                        self.judged(record)
                if self._clock() > until:
                    return

    def _read_head(self, head: tuple[str, int]) -> LabelRecord | None:
        try:
            return self._inbox.label_record(*head)
        except StoreError:
            return None  # the record stays unread, and the page of the item says why

    def _ordered(self, order: Order) -> array[int]:
        """Sort the places of all items. The newest of equal items comes first."""
        if order not in self._orders:
            newest: Iterable[int] = range(len(self._names) - 1, -1, -1)
            if order == "disagreeing":
                newest = (place for place in newest if "d" in self._names[place][FLAGS:][:2])
            by_fact = sorted(newest, key=lambda place: self._fact(order, place))
            self._orders[order] = array("I", by_fact)
        return self._orders[order]

    def _fact(self, order: Order, place: int) -> int:
        """Return the number that an order sorts by, lowest first."""
        name = self._names[place]
        if order == "uncertain":
            return int(name[SCORE])
        if order == "unknown":
            known = MILLE if name[UNKNOWN] == NOT_KNOWN else MILLE - int(name[UNKNOWN])
            return known if name[FLAGS] == "u" else 2 * MILLE + known
        return 0

    def _start(self, order: Order, places: array[int], cursor: str) -> int:
        """Find the first item after a cursor. The item of the cursor may be deleted by now."""
        text, _, item = cursor.partition("~")
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and is_id(item)):
            raise WrongUsage(f"{cursor[:60]!r} is not the cursor of a page")
        place = bisect_left(self._names, item)
        key = (int(text), -place)
        return bisect_right(places, key, key=lambda place: (self._fact(order, place), -place))

    def _codes(self, states: Iterable[State]) -> frozenset[int]:
        codes = {STATES.index(state) for state in states}
        return frozenset(codes | {NOT_READ} if STATES.index("labelled") in codes else codes)

    def _place(self, item: str) -> int | None:
        """Find the place of an item; None if there is none."""
        place = bisect_left(self._names, item)
        is_there = place < len(self._names) and self._names[place].startswith(f"{item}.")
        return place if is_there else None

    def _row(self, place: int) -> ItemRow:
        code = self._states[place]
        return ItemRow(
            facts=facts_of(self._names[place]),
            number=self._numbers[place],
            state="labelled" if code == NOT_READ else STATES[code],
        )
