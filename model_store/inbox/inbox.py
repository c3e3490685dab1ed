"""Add items to the inbox of a store, read them, label them, delete them.

The record of an item is written first and its picture last, so an item is there when its picture
is. A deletion takes the picture first. Label records have numbers and are created if absent, so two
people never overwrite each other.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from model_store.backends.base import MAX_CONFLICTS, ObjectMissing, ObjectRefused, Objects, parsed
from model_store.errors import (
    ItemNotFound,
    LabelConflict,
    LabelInvalid,
    RecordInvalid,
    SpecInvalid,
    StoreError,
    StoreUnsupported,
)
from model_store.inbox.naming import (
    PICTURES,
    USED,
    is_id,
    item_name,
    label_name,
    picture_name,
    used_name,
    used_of,
)
from model_store.names import new_class_name
from model_store.records.inbox import ItemRecord, LabelKind, LabelRecord, UsedRecord
from model_store.records.sealing import (
    create_record,
    find_record,
    read_record,
    refusing_bad_fields,
    timestamp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A statement about an item. Only the kind `label` has a label."""

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
        """Add an item. An item that is there already stays as it is."""
        if hashlib.sha256(picture).hexdigest() != item.picture.sha256:
            raise RecordInvalid(item_name(item.id), "it names another picture")
        name = item_name(item.id)
        if not create_record(self.objects, name, item):
            found = find_record(self.objects, name, ItemRecord)
            if found is None or found.picture.sha256 != item.picture.sha256:
                return  # it was deleted meanwhile, or is another picture under our id
            item = found
        self.objects.create(picture_name(item), picture)
        if not self._has(name):
            self.objects.delete(picture_name(item))  # it was deleted while it was written

    def item(self, item: str) -> ItemRecord:
        """Read the record of an item. Raise ItemNotFound where there is none."""
        if not is_id(item):
            raise ItemNotFound(item[:40])
        name = item_name(item)
        try:
            found = read_record(self.objects, name, ItemRecord)
        except ObjectMissing as error:
            raise ItemNotFound(item) from error
        if found.id != item:
            raise RecordInvalid(name, f"it says it is item {found.id}")
        return found

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

    def history(self, item: str) -> list[LabelRecord]:
        """Read all label records of an item, oldest first."""
        found: list[LabelRecord] = []
        while (record := self.label_record(item, len(found) + 1)) is not None:
            found.append(record)
        return found

    def head(self, item: str) -> LabelRecord | None:
        """Read the newest label record of an item; None where there is none."""
        history = self.history(item)
        return history[-1] if history else None

    def label_record(self, item: str, number: int) -> LabelRecord | None:
        name = label_name(item, number)
        found = find_record(self.objects, name, LabelRecord)
        if found is not None and (found.item, found.number) != (item, number):
            raise RecordInvalid(name, f"it says it is record {found.number} of {found.item}")
        return found

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
        LabelConflict where there is a newer one. Without `after` the record is appended anyway.
        `time` is when the label was given, if that was not now.
        """
        self.item(item)
        for _ in range(MAX_CONFLICTS):
            head = self.head(item)
            number = head.number if head else 0
            if after is not None and number != after:
                raise _conflict(item, head, after=after)
            record = _label_record(item, number + 1, judgement, actor=actor, time=time)
            if create_record(self.objects, label_name(item, record.number), record):
                self._take_back_if_gone(record)
                return record
        raise StoreError(f"item {item} gets labels from too many others; try again")

    def delete(self, item: str) -> None:
        """Delete an item: picture, record and labels. Nothing of it stays."""
        if not is_id(item):
            raise ItemNotFound(item[:40])
        try:
            self.objects.delete(picture_name(self.item(item)))
        except (ItemNotFound, RecordInvalid, StoreUnsupported):
            self._delete_pictures_of(item)
        # The record before the labels: who adds a label looks for the record afterwards.
        self.objects.delete(item_name(item))
        self._delete_labels(item)

    def use(self, version: int, items: Mapping[str, int], *, actor: str) -> UsedRecord:
        """Record that a version was taught with these label records: numbers by item."""
        with refusing_bad_fields():
            record = UsedRecord(
                version=version,
                items=dict(sorted(items.items())),
                actor=actor,
                time=timestamp(),
                transaction=uuid.uuid4().hex,
            )
        name = used_name(version)
        if not create_record(self.objects, name, record):
            raise RecordInvalid(name, "it is there already")
        return record

    def used(self) -> dict[int, UsedRecord]:
        """Read the records of use, by version."""
        found: dict[int, UsedRecord] = {}
        for version in sorted(parsed(self.objects.list_names(USED), used_of)):
            record = find_record(self.objects, used_name(version), UsedRecord)
            if record is not None:
                if record.version != version:
                    raise RecordInvalid(used_name(version), f"it is of version {record.version}")
                found[version] = record
        return found

    def _take_back_if_gone(self, record: LabelRecord) -> None:
        """Delete our record where the item was deleted meanwhile."""
        try:
            self.item(record.item)
        except ItemNotFound:
            self.objects.delete(label_name(record.item, record.number))
            raise

    def _delete_labels(self, item: str) -> None:
        number = 1
        while self._has(label_name(item, number)):
            self.objects.delete(label_name(item, number))
            number += 1

    def _delete_pictures_of(self, item: str) -> None:
        """Delete the picture of an item whose record cannot tell its name."""
        for name in self.objects.list_names(f"{PICTURES}/{item[:8]}"):
            if name.rpartition("/")[2].startswith(f"{item}."):
                self.objects.delete(name)

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
    with refusing_bad_fields():
        return LabelRecord(
            item=item,
            number=number,
            kind=judgement.kind,
            label=judgement.label,
            actor=actor,
            time=time or timestamp(),
            transaction=uuid.uuid4().hex,
        )
