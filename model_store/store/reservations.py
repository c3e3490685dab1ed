"""Announce the shards that a run needs, before it writes them or relies on them.

While an announcement stands, housekeeping touches none of the shards that it names. The manifest
with the same transaction ends it. Announcements of runs that died end by their age.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from model_store.backends.base import ObjectMissing, Objects
from model_store.errors import OutcomeUnknown, RecordInvalid, StoreError, WriteFailed
from model_store.layout import RUNS, run_name, run_of
from model_store.records.fields import Record, Sha256, Transaction, Version
from model_store.records.gc_marks import rescue
from model_store.records.sealing import FORMAT, create_record, read_record

EXPIRY_S = 7 * 24 * 3600.0
"""Older announcements, by the store's own clock, are those of runs that died."""

MAX_ANNOUNCEMENTS = 1000  # of one run


class Announcement(Record):
    """`runs/<transaction>.json`. The random `id` tells our announcement after a lost reply."""

    format: Literal[1] = FORMAT
    transaction: Transaction
    parent: Version | None
    shards: tuple[Sha256, ...]
    id: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An announcement in a listing; `record` is None when it has expired."""

    name: str
    transaction: str
    record: Announcement | None


def announce(
    objects: Objects, transaction: str, *, parent: int | None, digests: Collection[str]
) -> None:
    """Announce a run: none of `digests` is swept until the run ends or expires."""
    record = Announcement(
        transaction=transaction,
        parent=parent,
        shards=tuple(sorted(set(digests))),
        id=uuid.uuid4().hex,
    )
    try:
        _create(objects, record)
    except OutcomeUnknown as error:
        # An announcement only protects: with or without it, nothing was published.
        raise WriteFailed(str(error)) from error
    # Announced first, looked for marks second; a sweep does it the other way round. So one of
    # the two always sees the other.
    rescue(objects, frozenset(record.shards))


def withdraw(objects: Objects, transaction: str) -> None:
    """End a run: shards that only the run needs may go."""
    for entry in objects.list(RUNS):
        if run_of(entry.name) == transaction:
            objects.delete(entry.name)


@contextmanager
def announced(
    objects: Objects, transaction: str, *, parent: int | None, digests: Collection[str]
) -> Iterator[None]:
    """Announce a publish around it, and withdraw it where the outcome is known."""
    try:
        announce(objects, transaction, parent=parent, digests=digests)
        yield
    except OutcomeUnknown:
        raise  # the manifest may be there, or still arrive
    except StoreError:
        _withdraw_quietly(objects, transaction)
        raise
    _withdraw_quietly(objects, transaction)


def standing(objects: Objects, *, now_s: float) -> list[Standing]:
    """List all announcements, with the records of those that have not expired."""
    found: list[Standing] = []
    for entry in objects.list(RUNS):
        transaction = run_of(entry.name)
        if transaction is None:
            continue
        record = None
        if now_s - entry.modified_s <= EXPIRY_S:
            try:
                record = _read(objects, entry.name, transaction)
            except ObjectMissing:
                continue  # withdrawn since: its manifest, if there is one, came before that
        found.append(Standing(name=entry.name, transaction=transaction, record=record))
    return found


def _create(objects: Objects, record: Announcement) -> None:
    for number in range(1, MAX_ANNOUNCEMENTS):
        if create_record(objects, run_name(record.transaction, number), record):
            return
    raise WriteFailed(f"run {record.transaction} has announced itself too often")


def _read(objects: Objects, name: str, transaction: str) -> Announcement:
    record = read_record(objects, name, Announcement)
    if record.transaction != transaction:
        raise RecordInvalid(name, f"it says it is of run {record.transaction}")
    return record


def _withdraw_quietly(objects: Objects, transaction: str) -> None:
    # The outcome of the publish must not be hidden. An announcement that stays ends by its age.
    with suppress(StoreError):
        withdraw(objects, transaction)
