"""Borrow experts from other stores, and keep those that other stores have borrowed.

A borrower announces itself in a store before it relies on a shard there. While its record stands,
housekeeping deletes no expert of that store. Nothing but experts is ever borrowed: pictures and
statistics must go where `forget` is asked for, and a classifier is of one version alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from model_store.backends.base import ObjectMissing, ObjectRefused, Objects
from model_store.backends.location import WAY, follow_way, objects_at, way_between
from model_store.errors import (
    AlternateRefused,
    ShardUnreachable,
    StillBorrows,
    StoreError,
    StoreNotFound,
    WrongUsage,
)
from model_store.layout import BORROWERS, STORE, borrower_of, shard_name
from model_store.records.gc_marks import list_condemned, rescue
from model_store.records.manifest import ShardRef
from model_store.records.sealing import (
    FORMAT,
    LATER,
    Record,
    Timestamp,
    Transaction,
    create_record,
    find_record,
    make_record,
    read_record,
)
from model_store.store.shard import check_digest, is_expert

MAX_SHARD_BYTES = 1 << 34  # twice the largest network that a spec allows, in float32
_MAX_ALTERNATES = 8

log = logging.getLogger("model_store.alternates")


def _checked_way(text: str) -> str:
    if not WAY.fullmatch(text):
        raise ValueError("it is not a way that leads up at least once and then down")
    return text


_Way = Annotated[str, AfterValidator(_checked_way)]


class Alternate(Record):
    """A store from which another one borrows: its id, and the way to it from the borrower."""

    id: Transaction
    location: _Way


class StoreRecord(Record):
    """`store.json`: the format and the id of a store, and the stores from which it borrows."""

    format: Literal[1] = FORMAT
    id: Transaction
    alternates: Annotated[tuple[Alternate, ...], Field(max_length=_MAX_ALTERNATES), LATER] = ()

    @model_validator(mode="after")
    def _alternates_are_other_stores(self) -> Self:
        ids = [self.id, *(alternate.id for alternate in self.alternates)]
        if len(set(ids)) < len(ids):
            raise ValueError("a store borrows from itself, or from one store twice")
        return self


class Borrower(Record):
    """`borrowers/<id>.<place>.json`: the store with that id borrows here. `location` is the way to
    it from here, and `place` the start of the SHA-256 of that way."""

    format: Literal[1] = FORMAT
    id: Transaction
    location: _Way
    time: Timestamp
    transaction: Transaction


def alternate_at(location: str, lender: str) -> Alternate:
    """Describe the store at `lender` as an alternate of the one at `location`. Raise
    AlternateRefused where it cannot be one."""
    way = way_between(location, lender)
    return Alternate(id=_lending(objects_at(lender), lender).id, location=way)


def _lending(objects: Objects, location: str) -> StoreRecord:
    """Read the record of a store that can lend. A store that borrows cannot: so no chain of
    alternates is longer than one step, and none goes round."""
    try:
        record = read_record(objects, STORE, StoreRecord)
    except ObjectMissing as error:
        raise AlternateRefused(f"there is no store at {location}") from error
    if record.alternates:
        raise AlternateRefused(
            f"the store at {location} borrows from another one itself: name that one instead"
        )
    return record


class Alternates:
    """The stores from which one store borrows. Each is opened when it is needed."""

    def __init__(self, location: str, record: StoreRecord) -> None:
        self._location = location
        self._borrower = record.id
        self._opened: dict[str, Objects] = {}
        self.named = record.alternates

    def read(self, ref: ShardRef) -> bytes:
        """Read an expert from the first alternate that has it whole. Raise ShardUnreachable where
        none has it, with the reason of each."""
        reasons: list[str] = []
        for alternate in self.named:
            try:
                return self._read_from(alternate, ref)
            except (StoreError, WrongUsage) as error:
                reasons.append(f"alternate {alternate.location}: {error}")
        raise ShardUnreachable(ref.sha256, reasons)

    def lend(self, ref: ShardRef) -> bool:
        """Return whether an alternate has an expert whole, and keeps it for this store from now on.
        A version may then name the expert although its own store does not have it."""
        for alternate in self.named if ref.kind == "expert" else ():
            try:
                self._announce_in(alternate)
                self._read_from(alternate, ref)
                return True
            except ObjectMissing:
                continue
            except (StoreError, WrongUsage) as error:
                log.warning(
                    "expert %s is not borrowed from %s: %s", ref.sha256, alternate.location, error
                )
        return False

    def announce(self) -> None:
        """Announce this store in all its alternates."""
        for alternate in self.named:
            self._announce_in(alternate)

    def withdraw(self) -> None:
        """Take back what `announce` announced, where the store was not made."""
        for alternate in self.named:
            self._open(alternate).delete(self._record_in(alternate)[0])

    def problems(self) -> Iterator[str]:
        """Say of each alternate why it is of no use, or that it does not know this store."""
        for alternate in self.named:
            try:
                name, _ = self._record_in(alternate)
                if find_record(self._open(alternate), name, Borrower) is None:
                    yield (
                        f"alternate {alternate.location} has no record of this store, so its gc "
                        "may delete what is borrowed; `dne-store init` with the same --alternate "
                        "announces it again"
                    )
            except (StoreError, WrongUsage) as error:
                yield f"alternate {alternate.location}: {error}"

    def backends(self) -> Iterator[Objects]:
        """Yield the backends of the alternates that can be opened."""
        for alternate in self.named:
            try:
                yield self._open(alternate)
            except (StoreError, WrongUsage) as error:
                log.warning("alternate %s cannot be opened: %s", alternate.location, error)

    def _read_from(self, alternate: Alternate, ref: ShardRef) -> bytes:
        data = self._open(alternate).read(shard_name(ref.sha256), max_bytes=ref.bytes)
        check_digest(ref, data)
        return data

    def _announce_in(self, alternate: Alternate) -> None:
        objects = self._open(alternate)
        name, way = self._record_in(alternate)
        if find_record(objects, name, Borrower) is None:
            create_record(objects, name, make_record(Borrower, id=self._borrower, location=way))
        # Announced first, looked for marks second; a sweep lists marks first, and borrowers
        # second. So one of the two always sees the other.
        marked = {mark.sha256 for mark in list_condemned(objects).marks}
        rescue(objects, frozenset(experts_among(objects, marked)))

    def _record_in(self, alternate: Alternate) -> tuple[str, str]:
        """Return the name of this store's record in an alternate, and the way back to it."""
        way = way_between(follow_way(self._location, alternate.location), self._location)
        place = hashlib.sha256(way.encode()).hexdigest()[:32]
        return f"{BORROWERS}/{self._borrower}.{place}.json", way

    def _open(self, alternate: Alternate) -> Objects:
        """Open an alternate. Raise AlternateRefused where there is another store now."""
        if alternate.id not in self._opened:
            location = follow_way(self._location, alternate.location)
            objects = objects_at(location)
            found = _lending(objects, location).id
            if found != alternate.id:
                raise AlternateRefused(
                    f"{location} holds store {found}, and not {alternate.id}: bring that one back"
                )
            self._opened[alternate.id] = objects
        return self._opened[alternate.id]


def borrower_records(objects: Objects) -> list[str]:
    """List the names of the records of all borrowers."""
    return sorted(name for name in objects.list_names(BORROWERS) if borrower_of(name))


def experts_among(objects: Objects, digests: Collection[str]) -> Iterator[str]:
    """Yield the digests of shards that are there and hold experts, by the names of their tensors.
    Bytes that are no shard are of no use to a borrower."""
    for sha256 in sorted(digests):
        try:
            data = objects.read(shard_name(sha256), max_bytes=MAX_SHARD_BYTES)
        except (ObjectMissing, ObjectRefused):
            continue
        if is_expert(data):
            yield sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowing:
    """One record of a borrower: its id, where it said it is, and what is there now. `why`: the
    reason where that is not known."""

    id: str
    location: str
    state: Literal["borrows", "gone", "another store", "not known"]
    why: str
    record: str


def list_borrowers(objects: Objects, *, location: str) -> list[Borrowing]:
    """Look after each store that has announced itself in the store at `location`."""
    lender = read_record(objects, STORE, StoreRecord).id
    return [
        _look_after(objects, name, location=location, lender=lender)
        for name in borrower_records(objects)
    ]


def _look_after(objects: Objects, name: str, *, location: str, lender: str) -> Borrowing:
    borrowing = partial(Borrowing, id=borrower_of(name) or "", record=name, why="")
    place = "?"
    try:
        place = follow_way(location, read_record(objects, name, Borrower).location)
        held = find_record(objects_at(place), STORE, StoreRecord)
    except (StoreError, WrongUsage) as error:
        return borrowing(location=place, state="not known", why=str(error))
    if held is None:
        return borrowing(location=place, state="gone")
    ids = {held.id, *(alternate.id for alternate in held.alternates)}
    return borrowing(
        location=place,
        state="borrows" if {borrower_of(name), lender} <= ids else "another store",
    )


def release(objects: Objects, borrower: str, *, location: str) -> list[Borrowing]:
    """Delete the records of a borrower that is gone. Raise StillBorrows where it is not."""
    found = [one for one in list_borrowers(objects, location=location) if one.id == borrower]
    if not found:
        raise StoreNotFound(f"no store with the id {borrower} has borrowed from {location}")
    for one in found:
        if one.state == "borrows":
            raise StillBorrows(one.id, one.location, "it borrows from this one")
        if one.state == "not known":
            raise StillBorrows(one.id, one.location, one.why)
    for one in found:
        objects.delete(one.record)
    return found
