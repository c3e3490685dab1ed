"""Add items to the inbox of a store, read them, label them and delete them.

The record of an item is written first and its picture last: an item exists when its picture does.
A deletion first marks the id as removed, and then deletes the picture. Servers that still hold the
picture look for the mark, so the picture does not come back. Label records have numbers and are
created if absent, so two people never overwrite each other.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from model_store.backends.base import MAX_CONFLICTS, ObjectMissing, ObjectRefused, Objects, parsed
from model_store.errors import (
    ItemNotFound,
    LabelConflict,
    LabelInvalid,
    LabelsFull,
    RecordInvalid,
    SpecInvalid,
    StoreError,
    StoreUnsupported,
    WriteFailed,
)
from model_store.loop.item_names import (
    PICTURES,
    REMOVED,
    USED,
    is_id,
    item_name,
    label_name,
    picture_name,
    removed_name,
    removed_of,
    time_of,
    used_name,
    used_of,
)
from model_store.names import new_class_name
from model_store.records.inbox import ItemRecord, LabelKind, LabelRecord, UsedRecord
from model_store.records.sealing import (
    create_record,
    find_record,
    make_record,
    read_record,
    timestamp,
)

MAX_LABELS = 100
"""Label records of an item. People correct a label a few times; the limit stops programs that
label in an endless loop."""
MARKED = timedelta(days=1)
"""Mark deleted items that are younger than this: servers hold pictures for an hour, and clocks
differ."""

log = logging.getLogger("model_store.loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A statement about an item. Only a judgement of the kind `label` has a label."""

    kind: LabelKind
    label: str | None = None

    @classmethod
    def of_class(cls, name: str) -> Judgement:
        """Name the class of a picture. Raise LabelInvalid for text that cannot name one."""
        try:
            return cls(kind="label", label=new_class_name(name))
        except SpecInvalid as error:
            raise LabelInvalid(str(error)) from error


WRONG = Judgement(kind="wrong")
DISCARD = Judgement(kind="discard")
CLEAR = Judgement(kind="clear")


class Inbox:
    """The inbox of one store. Safe to use from several threads, as its objects are."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def add(self, item: ItemRecord, picture: bytes) -> None:
        """Add an item. Leave an existing item as it is. Raise ItemNotFound if the item was
        deleted."""
        if hashlib.sha256(picture).hexdigest() != item.picture.sha256:
            raise RecordInvalid(item_name(item.id), "it names another picture")
        name, removed = item_name(item.id), removed_name(item.id)
        if self._has(removed):
            raise ItemNotFound(item.id)
        if not create_record(self.objects, name, item):
            existing = find_record(self.objects, name, ItemRecord)
            if existing is None or existing.picture.sha256 != item.picture.sha256:
                return  # the item was deleted meanwhile, or another picture has our id
            item = existing
        self.objects.create(picture_name(item), picture)
        if not self._has(name) or self._has(removed):  # it was deleted while it was written
            self.objects.delete(picture_name(item))
            self.objects.delete(name)

    def item(self, item: str) -> ItemRecord:
        """Read the record of an item. Raise ItemNotFound if there is none."""
        if not is_id(item):
            raise ItemNotFound(item[:40])
        name = item_name(item)
        try:
            record = read_record(self.objects, name, ItemRecord)
        except ObjectMissing as error:
            raise ItemNotFound(item) from error
        if record.id != item:
            raise RecordInvalid(name, f"it says it is item {record.id}")
        return record

    def picture(self, item: ItemRecord) -> bytes:
        """Read the picture of an item, and check its digest."""
        name = picture_name(item)
        try:
            data = self.objects.read(name, max_bytes=item.picture.bytes)
        except ObjectMissing as error:
            raise ItemNotFound(item.id) from error
        except ObjectRefused as error:
            raise RecordInvalid(name, error.reason) from error
        if hashlib.sha256(data).hexdigest() != item.picture.sha256:
            raise RecordInvalid(name, "its digest does not match")
        return data

    def history(self, item: str, *, after: int = 0) -> list[LabelRecord]:
        """Read all label records of an item with numbers above `after`, oldest first."""
        records: list[LabelRecord] = []
        while (record := self.label_record(item, after + len(records) + 1)) is not None:
            records.append(record)
        return records

    def head(self, item: str) -> LabelRecord | None:
        """Read the newest label record of an item; None if there is none."""
        number = self.newest_number(item)
        return self.label_record(item, number) if number else None

    def newest_number(self, item: str) -> int:
        """Find the number of the newest label record; 0 if there is none. Numbers have no gaps, so
        a binary search over names needs only a logarithmic number of requests."""
        low, step = 0, 1
        while self._has(label_name(item, low + step)):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has(label_name(item, middle)) else (low, middle)
        return low

    def label_record(self, item: str, number: int) -> LabelRecord | None:
        name = label_name(item, number)
        record = find_record(self.objects, name, LabelRecord)
        if record is not None and (record.item, record.number) != (item, number):
            raise RecordInvalid(name, f"it says it is record {record.number} of {record.item}")
        return record

    def judge(
        self,
        item: str,
        judgement: Judgement,
        *,
        actor: str,
        after: int | None = None,
        time: str | None = None,
    ) -> LabelRecord:
        """Append a label record to an item.

        `after` is the number of the newest record that the caller has seen (0: none). Raise
        LabelConflict if there is a newer one. Without `after`, append the record anyway. `time` is
        the time of the label, if that is not now. Raise LabelsFull if the item has as many records
        as it may have.
        """
        self.item(item)
        for _ in range(MAX_CONFLICTS):
            number = self.newest_number(item)
            if after is not None and number != after:
                raise _conflict(item, self.head(item), after=after)
            if number >= MAX_LABELS:
                raise LabelsFull(item, most=MAX_LABELS)
            record = _label_record(item, number + 1, judgement, actor=actor, time=time)
            if create_record(self.objects, label_name(item, record.number), record):
                try:
                    self.item(item)
                except ItemNotFound:  # the item was deleted meanwhile, and our record goes too
                    self.objects.delete(label_name(item, record.number))
                    raise
                return record
        raise StoreError(f"item {item} gets labels from too many others; try again")

    def delete(self, item: str) -> None:
        """Delete an item with its picture, record and labels. Only a mark of its id remains."""
        if not is_id(item):
            raise ItemNotFound(item[:40])
        self._mark_removed(item)
        try:
            self.objects.delete(picture_name(self.item(item)))
        except (ItemNotFound, RecordInvalid, StoreUnsupported):
            for name in self.objects.list_names(f"{PICTURES}/{item[:8]}"):
                if name.rpartition("/")[2].startswith(f"{item}."):
                    self.objects.delete(name)
        # Delete the record before the labels: `judge` looks for the record after it adds a label.
        self.objects.delete(item_name(item))
        number = 1
        while self._has(label_name(item, number)):
            self.objects.delete(label_name(item, number))
            number += 1

    def drop_removals(self, now: datetime) -> None:
        """Delete the marks of items that servers can no longer hold."""
        for item in parsed(self.objects.list_names(REMOVED), removed_of):
            if time_of(item) < now - 2 * MARKED:
                self.objects.delete(removed_name(item))

    def use(self, version: int, items: Mapping[str, int], *, actor: str) -> UsedRecord:
        """Record that a version was taught with these label records: numbers by item."""
        record = make_record(
            UsedRecord, version=version, items=dict(sorted(items.items())), actor=actor
        )
        name = used_name(version)
        if not create_record(self.objects, name, record):
            raise RecordInvalid(name, "it exists already")
        return record

    def used(self) -> dict[int, UsedRecord]:
        """Read the records of use, by version."""
        by_version: dict[int, UsedRecord] = {}
        for version in sorted(parsed(self.objects.list_names(USED), used_of)):
            record = find_record(self.objects, used_name(version), UsedRecord)
            if record is not None:
                if record.version != version:
                    raise RecordInvalid(used_name(version), f"it is of version {record.version}")
                by_version[version] = record
        return by_version

    def _mark_removed(self, item: str) -> None:
        """Mark an item that a server may still hold. Go on without the mark if the disk is full."""
        if time_of(item) < datetime.now(UTC) - MARKED:
            return
        try:
            self.objects.create(removed_name(item), b"")
        except WriteFailed as error:
            log.warning("item %s is deleted without a mark: %s", item, error)

    def _has(self, name: str) -> bool:
        try:
            self.objects.read(name, max_bytes=0)
        except ObjectMissing:
            return False
        except ObjectRefused:
            return True
        return True


def _conflict(item: str, head: LabelRecord | None, *, after: int) -> LabelConflict:
    return LabelConflict(
        item,
        after=after,
        number=head.number if head else 0,
        said=(head.label or head.kind) if head else "",
        actor=head.actor if head else "",
    )


def _label_record(
    item: str, number: int, judgement: Judgement, *, actor: str, time: str | None
) -> LabelRecord:
    return make_record(
        LabelRecord,
        item=item,
        number=number,
        kind=judgement.kind,
        label=judgement.label,
        actor=actor,
        time=time or timestamp(),
    )
