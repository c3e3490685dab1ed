"""Read many items at a time: records and labels of a page, of all items, or of those with labels.

Readers share threads, because object storage answers many requests at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from model_store.errors import ItemNotFound, RecordInvalid, StoreUnsupported
from model_store.inbox.index import Index, Row

if TYPE_CHECKING:
    from model_store.inbox.inbox import Inbox
    from model_store.records.inbox import ItemRecord, LabelRecord

READERS = 16
AT_ONCE = 256

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item with its newest label record; None for an item that nobody labelled."""

    record: ItemRecord
    head: LabelRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """An item that has a class, and the label record that says so."""

    record: ItemRecord
    head: LabelRecord
    label: str


def read_items(inbox: Inbox, rows: Iterable[Row]) -> Iterator[Item]:
    """Read the records of some items, in their order. Items that are deleted or damaged meanwhile
    are passed over."""

    def read(row: Row) -> Item | None:
        try:
            record = inbox.item(row.id)
            head = inbox.label_record(row.id, row.number) if row.number else None
        except (ItemNotFound, RecordInvalid, StoreUnsupported):
            return None
        return Item(record=record, head=head)

    yield from (item for item in in_threads(read, rows) if item is not None)


def labelled_items(
    inbox: Inbox, index: Index, *, but_used_by: Collection[int] = ()
) -> Iterator[Labelled]:
    """Read the items whose newest label record names a class, newest first. Leave out those whose
    record one of the versions `but_used_by` has used."""
    used = used_labels(inbox, but_used_by)
    rows = [row for row in index.rows(["labelled"]) if used.get(row.id) != row.number]
    for item in read_items(inbox, rows):
        if item.head is not None and item.head.label is not None:
            yield Labelled(record=item.record, head=item.head, label=item.head.label)


def used_labels(inbox: Inbox, versions: Collection[int]) -> dict[str, int]:
    """Map items to the newest label record that one of the versions has used."""
    found: dict[str, int] = {}
    for version, record in inbox.used().items():
        if version in versions:
            for item, number in record.items.items():
                found[item] = max(number, found.get(item, 0))
    return found


def in_threads(work: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
    """Yield the results in order, with a bounded number of them in memory."""
    waiting = iter(things)
    with ThreadPoolExecutor(READERS, "inbox") as readers:
        while some := list(islice(waiting, AT_ONCE)):
            yield from readers.map(work, some)


def open_index(inbox: Inbox) -> Index:
    """List an inbox and read all its label records, for one command."""
    index = Index(inbox)
    index.refresh(whole=True)
    left = 0
    while index.unread not in (0, left):  # damaged records stay unread
        left = index.unread
        index.refresh()
    return index


def rows_of(index: Index, items: Sequence[str]) -> list[Row]:
    """Find some items by their ids. Raise ItemNotFound for the first that is not there."""
    found = []
    for item in items:
        row = index.find(item)
        if row is None:
            raise ItemNotFound(item[:40])
        found.append(row)
    return found
