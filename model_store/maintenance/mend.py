"""Set aside objects that stand in a channel's way and cannot be its records.

Records are written one after the other. So an object after a gap was not written by this software,
or the records before it were lost. Where it is not a record either, every move would stop at
it: it is copied to `mended/`, with actor and reason, and deleted.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from model_store.backends.base import ObjectMissing
from model_store.errors import RecordInvalid, StoreError, StoreUnsupported
from model_store.layout import MENDED, mended_name, record_name
from model_store.records.channel import ChannelName, ChannelRecord, decode_record
from model_store.records.gc_marks import SWEEP_WINDOW_S, clock_s
from model_store.records.sealing import (
    FORMAT,
    Count,
    Record,
    Sha256,
    Text,
    Timestamp,
    Transaction,
    Version,
    create_record,
    make_record,
    parse_object,
    read_sealed,
)
from model_store.store.store import Store

_MAX_CONTENT_BYTES = 64 << 10


class _MendedRecord(Record):
    """`mended/<channel>/<number>.<n>.json`: an object that was set aside. It is a claim as well:
    only its writer deletes the object."""

    format: Literal[1] = FORMAT
    channel: ChannelName
    number: Version
    problem: Text
    bytes: Count
    sha256: Sha256 | None
    content: str | None
    """The bytes in base64; null where they are too many or could not be read."""
    actor: Text
    reason: Text
    time: Timestamp
    transaction: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """An object under the name of a record, after a gap. `problem` tells why it is not a record;
    None for a record, also of a later format. `data` is None where it cannot be read."""

    number: int
    data: bytes | None
    problem: str | None
    record: ChannelRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MendReport:
    """The objects that were set aside, and those in `left`, which stay although they come after a
    gap. `head` is the channel's newest record afterwards."""

    channel: str
    dry_run: bool
    last: int
    head: ChannelRecord | None
    aside: tuple[Stray, ...]
    left: tuple[Stray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mender:
    """The actor and the reason of setting records aside."""

    actor: str
    reason: str
    monotonic_s: Callable[[], float] = time.monotonic


def mend_channel(
    store: Store, channel: str, *, mender: Mender, dry_run: bool, also_valid: bool = False
) -> MendReport:
    """Set aside the objects after a gap that are not records. With `also_valid` set aside sound
    records too: the channel then names the version of the last record before the gap."""
    numbers = store.record_numbers(channel)
    # The last of the numbers 1, 2, 3, … that are there without a gap.
    last = sum(number == place for place, number in enumerate(numbers, start=1))
    strays = [_judge(store, channel, number) for number in numbers if number > last]
    present = [stray for stray in strays if stray is not None]
    aside = [stray for stray in present if stray.problem or (also_valid and stray.record)]
    left = tuple(stray for stray in present if stray not in aside)
    if not dry_run:
        aside = [stray for stray in aside if _set_aside(store, channel, stray, mender=mender)]
    return MendReport(
        channel=channel,
        dry_run=dry_run,
        last=last,
        head=_head(store, channel, left=left, last=last),
        aside=tuple(aside),
        left=left,
    )


def _head(store: Store, channel: str, *, left: Sequence[Stray], last: int) -> ChannelRecord | None:
    if left:
        return left[-1].record
    try:
        return store.record(channel, last) if last else None
    except (RecordInvalid, StoreUnsupported):
        return None  # within the chain: a move to a named version goes on after it


def _judge(store: Store, channel: str, number: int) -> Stray | None:
    """Read and judge an object; None where it is gone. An error of the backend is raised: it says
    nothing about the object."""
    name = record_name(channel, number)
    try:
        data = read_sealed(store.objects, name)
    except ObjectMissing:
        return None
    except RecordInvalid as error:
        return Stray(number=number, data=None, problem=error.reason)
    try:
        record = decode_record(name, data, channel=channel, number=number)
    except RecordInvalid as error:
        return Stray(number=number, data=data, problem=error.reason)
    except StoreUnsupported as error:
        format_number = parse_object(data).get("format")  # a later one is not ours to judge
        is_later = type(format_number) is int and format_number > FORMAT
        return Stray(number=number, data=data, problem=None if is_later else str(error))
    return Stray(number=number, data=data, problem=None, record=record)


def _set_aside(store: Store, channel: str, stray: Stray, *, mender: Mender) -> bool:
    """Claim an object and delete it. Return False where another object is in its place.

    Deleting frees the number, and the next object with that number may be a true record. So only
    the owner of the newest claim deletes, soon after claiming; a claim counts for longer.
    """
    began_s = mender.monotonic_s()
    _claim(store, channel, stray, mender=mender)
    if _judge(store, channel, stray.number) != stray:
        return False
    if mender.monotonic_s() - began_s > SWEEP_WINDOW_S / 2:
        raise StoreError(f"{record_name(channel, stray.number)} is still there: it took too long")
    store.objects.delete(record_name(channel, stray.number))
    return True


def _claim(store: Store, channel: str, stray: Stray, *, mender: Mender) -> None:
    record = _record_of(channel, stray, mender=mender)
    now_s = clock_s(store.objects)
    held = {entry.name: entry for entry in store.objects.list(f"{MENDED}/{channel}")}
    attempt = 1
    while (name := mended_name(channel, stray.number, attempt)) in held:
        if now_s - held[name].modified_s <= SWEEP_WINDOW_S:
            raise _taken(channel, stray.number)
        attempt += 1
    if not create_record(store.objects, name, record):
        raise _taken(channel, stray.number)


def _taken(channel: str, number: int) -> StoreError:
    minutes = round(SWEEP_WINDOW_S / 60)
    return StoreError(
        f"{record_name(channel, number)} is being set aside, or was a moment ago; "
        f"where it stays, try again in {minutes} minutes"
    )


def _record_of(channel: str, stray: Stray, *, mender: Mender) -> _MendedRecord:
    data = stray.data
    short = data is not None and len(data) <= _MAX_CONTENT_BYTES
    return make_record(
        _MendedRecord,
        channel=channel,
        number=stray.number,
        problem=(stray.problem or "it comes after a gap")[:2000],
        bytes=len(data or b""),
        sha256=None if data is None else hashlib.sha256(data).hexdigest(),
        content=base64.b64encode(data).decode() if data is not None and short else None,
        actor=mender.actor,
        reason=mender.reason,
    )
