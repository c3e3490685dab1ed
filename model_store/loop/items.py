"""Read many items at a time, find those that are overdue or of one class, and delete them.

Work is spread over threads, because object storage answers many requests at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from model_store.backends.base import parsed
from model_store.errors import ItemNotFound, RecordInvalid, StoreUnsupported
from model_store.loop.index import ID_LENGTH, Index, ItemRow
from model_store.loop.item_names import (
    ITEMS,
    LABELS,
    PICTURES,
    ids_before,
    item_of,
    label_of,
    short_of,
)
from model_store.names import is_same

if TYPE_CHECKING:
    from model_store.loop.inbox import Inbox
    from model_store.records.inbox import ItemRecord, LabelRecord

READERS = 16
AT_ONCE = 256

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item with its newest label record; None for an item without a label."""

    record: ItemRecord
    head: LabelRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledItem:
    """An item that has a class, and the label record that says so."""

    record: ItemRecord
    head: LabelRecord
    label: str


def read_items(inbox: Inbox, rows: Iterable[ItemRow]) -> Iterator[Item]:
    """Read the records of some items, in the order of the rows. Skip items that were deleted or
    damaged meanwhile."""

    def read(row: ItemRow) -> Item | None:
        try:
            record = inbox.item(row.id)
            head = inbox.label_record(row.id, row.number) if row.number else None
        except (ItemNotFound, RecordInvalid, StoreUnsupported):
            return None
        return Item(record=record, head=head)

    yield from (item for item in in_threads(read, rows) if item is not None)


def labelled_items(
    inbox: Inbox, index: Index, *, but_used_by: Collection[int] = ()
) -> Iterator[LabelledItem]:
    """Read the items whose newest label record names a class, newest first. Leave out records that
    one of the versions `but_used_by` has used."""
    used = used_labels(inbox, but_used_by)
    rows = [row for row in index.rows(["labelled"]) if used.get(row.id) != row.number]
    for item in read_items(inbox, rows):
        if item.head is not None and item.head.label is not None:
            yield LabelledItem(record=item.record, head=item.head, label=item.head.label)


def used_labels(inbox: Inbox, versions: Collection[int]) -> dict[str, int]:
    """Map items to the newest label record that one of the versions has used."""
    newest: dict[str, int] = {}
    for version, record in inbox.used().items():
        if version in versions:
            for item, number in record.items.items():
                newest[item] = max(number, newest.get(item, 0))
    return newest


def in_threads(work: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """Yield the results in order, with a bounded number of them in memory."""
    waiting = iter(things)
    with ThreadPoolExecutor(READERS, "inbox") as readers:
        while batch := list(islice(waiting, AT_ONCE)):
            yield from readers.map(work, batch)


def open_index(inbox: Inbox) -> Index:
    """List an inbox and read all its label records, for one command."""
    index = Index(inbox)
    index.refresh(whole=True)
    left = 0
    while index.unread not in (0, left):  # damaged records stay unread
        left = index.unread
        index.refresh()
    return index


def overdue(inbox: Inbox, index: Index, *, days: float, now: datetime) -> list[str]:
    """List the items that are older than `days`, oldest first, both by the time in the id, which a
    server wrote, and by the date that the backend gives the picture. Leave out items with a label
    that no version has used yet: a person worked on them."""
    before = now - timedelta(days=days)
    old = index.older_than(before)
    if not old:
        return []
    used = used_labels(inbox, inbox.used())
    dated = _dated_before(inbox, {row.id[:8] for row in old}, before=before)
    return [
        row.id
        for row in old
        if row.id in dated and (row.state != "labelled" or used.get(row.id) == row.number)
    ]


def _dated_before(inbox: Inbox, days: Collection[str], *, before: datetime) -> set[str]:
    entries = [entry for day in days for entry in inbox.objects.list(f"{PICTURES}/{day}")]
    old = [entry.name for entry in entries if entry.modified_s < before.timestamp()]
    return {short[:ID_LENGTH] for short in parsed(old, short_of)}


def delete_items(inbox: Inbox, index: Index, items: Collection[str]) -> None:
    def delete(item: str) -> str:
        inbox.delete(item)
        return item

    for item in in_threads(delete, items):
        index.deleted(item)


def items_of_class(inbox: Inbox, index: Index, names: Collection[str]) -> list[str]:
    """Find the items with a label that is one of a class's names, and the items without a label
    whose answer is one of these names."""
    return [
        item.record.id
        for item in read_items(inbox, index.rows())
        if (said := _said_of(item)) is not None and any(is_same(said, name) for name in names)
    ]


def _said_of(item: Item) -> str | None:
    """Return the label of an item, or else the class that was answered."""
    if item.head is not None and item.head.label is not None:
        return item.head.label
    return item.record.answer.label if item.record.answer else None


def forget_items(inbox: Inbox, index: Index, names: Collection[str]) -> int:
    """Delete the items of a class, and return their number."""
    gone = items_of_class(inbox, index, names)
    delete_items(inbox, index, gone)
    return len(gone)


def delete_leftovers(inbox: Inbox, index: Index, *, days: float, now: datetime) -> int:
    """Delete records and labels without a picture, which a killed writer or an unfinished deletion
    has left. Return their number."""
    before = ids_before(now - timedelta(days=days))
    items = set(parsed(inbox.objects.list_names(ITEMS), item_of))
    items |= {item for item, _ in parsed(inbox.objects.list_names(LABELS), label_of)}
    gone = [item for item in items if item < before and index.find(item) is None]
    delete_items(inbox, index, gone)
    inbox.drop_removals(now)
    return len(gone)
