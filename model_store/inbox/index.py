"""Keep the names of all items in memory, sorted, with the state of each.

The index is built from two listings, and reads no item record. A row takes about 140 bytes.
Another look reads only the newest names; a whole listing finds deletions and others' labels.
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
from model_store.inbox.naming import (
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
    from model_store.inbox.inbox import Inbox
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
READ_S = 0.3
"""Time that one look may take to read label records; the rest is read by the next look."""
LATE = timedelta(minutes=15)
"""An item may be written this long after the time in its id."""
LOOK_S = 2.0
WHOLE_S = 15.0
WHOLE_SHARE = 20
"""A whole listing is made again after this many times the time that it took."""
ID_LENGTH = 31
SCORE, UNKNOWN, FLAGS, HASH = slice(32, 36), slice(37, 41), 42, slice(-20, -4)
"""Places of the facts in the last part of a picture's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An item of the index. `number` is that of its newest label record; 0 for none."""

    facts: Facts
    number: int
    state: State

    @property
    def id(self) -> str:
        return self.facts.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some items in their order. `next_cursor` continues; None at the end."""

    rows: tuple[Row, ...]
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
        """Look for changes, unless the last look was a moment ago. While another thread looks, go
        on with what is known, if anything is."""
        if not self._looking.acquire(blocking=whole or not self._is_built):
            return
        try:
            now = self._clock()
            if whole or now >= self._list_at:
                self._list_all()
                self._list_at = now + max(WHOLE_S, WHOLE_SHARE * (self._clock() - now))
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
        """Count the items with a label record that was not read yet."""
        return self._states.count(NOT_READ)

    def counts(self) -> dict[State, int]:
        """Count the items in each state. A label that was not read yet counts as one."""
        with self._lock:
            found = {state: self._states.count(code) for code, state in enumerate(STATES)}
            found["labelled"] += self._states.count(NOT_READ)
        return found

    def find(self, item: str) -> Row | None:
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
    ) -> Page:
        """Return the items after `cursor` that are in one of the states."""
        with self._lock:
            places = self._ordered(order)
            start = 0 if cursor is None else self._start(order, places, cursor)
            codes = self._codes(states)
            wanted = (place for place in places[start:] if self._states[place] in codes)
            found = list(islice(wanted, limit + 1))
            rows = tuple(self._row(place) for place in found[:limit])
            last = found[limit - 1] if len(found) > limit else None
            follow = None if last is None else f"{self._fact(order, last)}~{rows[-1].id}"
        return Page(rows=rows, next_cursor=follow)

    def rows(self, states: Iterable[State] = STATES) -> list[Row]:
        """List all items in some states, newest first."""
        with self._lock:
            codes = self._codes(states)
            return [
                self._row(place)
                for place in range(len(self._names) - 1, -1, -1)
                if self._states[place] in codes
            ]

    def waiting(self, number: int) -> str | None:
        """Return the id of the oldest item without a label, of the second oldest, and so on; None
        where fewer wait."""
        with self._lock:
            places = (place for place, code in enumerate(self._states) if code == 0)
            place = next(islice(places, number - 1, None), None)
            return None if place is None else self._names[place][:ID_LENGTH]

    def waiting_hashes(self) -> array[int]:
        """List the perceptual hashes of all items without a label."""
        with self._lock:
            waiting = (place for place, code in enumerate(self._states) if code == 0)
            return array("Q", (int(self._names[place][HASH], 16) for place in waiting))

    def older_than(self, moment: datetime) -> list[Row]:
        """List the items with ids of an earlier time, oldest first."""
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
        """Note an item that is gone."""
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
        """Add to a listing the items that came while it was made, and take out those that went."""
        if not self._changed:
            return names
        left = {one for one in names if one[:ID_LENGTH] not in self._changed}
        return sorted(left | {one for one in self._changed.values() if one is not None})

    def _list_new(self) -> None:
        now = datetime.now(UTC)
        since = ids_before(now - LATE)
        new: list[str] = []
        for day in days_since(since, now=now):
            folder = f"{PICTURES}/{day}"
            entries = self._inbox.objects.list(folder, after=f"{folder}/{since}")
            new += parsed((entry.name for entry in entries), short_of)
        with self._lock:
            gone = {item for item, short in self._changed.items() if short is None}
            self._merge(one for one in new if one[:ID_LENGTH] not in gone)

    def _merge(self, shorts: Iterable[str]) -> None:
        for name in set(shorts):
            if self._place(name[:ID_LENGTH]) is None:
                place = bisect_left(self._names, name)
                self._names.insert(place, name)
                self._numbers.insert(place, 0)
                self._states.insert(place, 0)
                self._orders.clear()

    def _replace(self, names: list[str]) -> None:
        """Take other names, and keep what is known of those that stay."""
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
        """Read label records that are new to us, as many as the time allows."""
        until = self._clock() + READ_S
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
                some, waiting = waiting[-4 * READERS :], waiting[: -4 * READERS]
                for record in readers.map(self._read_head, some):
                    if record is not None:
                        self.judged(record)
                if self._clock() > until:
                    return

    def _read_head(self, head: tuple[str, int]) -> LabelRecord | None:
        try:
            return self._inbox.label_record(*head)
        except StoreError:
            return None  # it stays as not read, and the page of the item says why

    def _ordered(self, order: Order) -> array[int]:
        """Sort the places of all items. Of equal ones the newest comes first."""
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
        """Find the first item after a cursor, whose own item may be gone by now."""
        fact, item = _parse_cursor(cursor)
        place = bisect_left(self._names, item)
        key = (fact, -place)
        return bisect_right(places, key, key=lambda one: (self._fact(order, one), -one))

    def _codes(self, states: Iterable[State]) -> frozenset[int]:
        codes = {STATES.index(state) for state in states}
        return frozenset(codes | {NOT_READ} if STATES.index("labelled") in codes else codes)

    def _place(self, item: str) -> int | None:
        """Find the row of an item; None where there is none."""
        place = bisect_left(self._names, item)
        found = place < len(self._names) and self._names[place].startswith(f"{item}.")
        return place if found else None

    def _row(self, place: int) -> Row:
        code = self._states[place]
        return Row(
            facts=facts_of(self._names[place]),
            number=self._numbers[place],
            state="labelled" if code == NOT_READ else STATES[code],
        )


def _parse_cursor(text: str) -> tuple[int, str]:
    fact, _, item = text.partition("~")
    if not (fact.isascii() and fact.isdigit() and len(fact) <= 4 and is_id(item)):
        raise WrongUsage(f"{text[:60]!r} is not the cursor of a page")
    return int(fact), item
