"""Delete items whose time is over, and items of a class that is to be forgotten."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from model_store.backends.base import parsed
from model_store.inbox.index import Index
from model_store.inbox.naming import ITEMS, LABELS, ids_before, item_of, label_of
from model_store.inbox.reading import in_threads, read_items, used_labels
from model_store.names import is_same

if TYPE_CHECKING:
    from model_store.inbox.inbox import Inbox


def expire(inbox: Inbox, index: Index, *, days: float, now: datetime) -> int:
    """Delete the items that are older than `days`, and return their number. A label that no version
    has used yet is somebody's work: its item stays."""
    old = index.older_than(now - timedelta(days=days))
    if not old:
        return 0
    used = used_labels(inbox, inbox.used())
    gone = [row.id for row in old if row.state != "labelled" or used.get(row.id) == row.number]
    delete_items(inbox, index, gone)
    return len(gone)


def delete_items(inbox: Inbox, index: Index, items: Collection[str]) -> None:
    def delete(item: str) -> str:
        inbox.delete(item)
        return item

    for item in in_threads(delete, items):
        index.deleted(item)


def items_of_class(inbox: Inbox, index: Index, class_name: str) -> list[str]:
    """Find the items that are labelled as a class, and those without a label that were answered
    with it."""
    return [
        item.record.id
        for item in read_items(inbox, index.rows())
        if is_same((item.head and item.head.label) or item.record.answer.label, class_name)
    ]


def forget_items(inbox: Inbox, index: Index, class_name: str) -> int:
    """Delete the items of a class, and return their number."""
    gone = items_of_class(inbox, index, class_name)
    delete_items(inbox, index, gone)
    return len(gone)


def delete_leftovers(inbox: Inbox, index: Index, *, days: float, now: datetime) -> int:
    """Delete records and labels without a picture: their writers died, or a deletion did not come
    to its end."""
    before = ids_before(now - timedelta(days=days))
    found = set(parsed(inbox.objects.list_names(ITEMS), item_of))
    found |= {item for item, _ in parsed(inbox.objects.list_names(LABELS), label_of)}
    gone = [item for item in found if item < before and index.find(item) is None]
    delete_items(inbox, index, gone)
    return len(gone)
