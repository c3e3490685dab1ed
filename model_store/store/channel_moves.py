"""Move channels: append a record that names the next target.

A record is created if its number is free. A writer that finds it taken looks at the channel again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from model_store.backends.base import MAX_CONFLICTS
from model_store.errors import (
    ChannelBroken,
    ChannelMoved,
    ChannelNotFound,
    VersionDeleted,
    WriteFailed,
)
from model_store.layout import record_name
from model_store.records.channel import (
    ChannelRecord,
    Mode,
    resume_target,
    rollback_target,
)
from model_store.records.fields import MAX_VERSION
from model_store.records.manifest import Manifest
from model_store.records.sealing import create_record, refusing_bad_fields, timestamp
from model_store.records.tombstone import deleted_versions

if TYPE_CHECKING:
    from model_store.store.store import Store

Check = Callable[[Manifest], object]
"""Called with the version that a record will name, before it is written. Raises to prevent it."""


def unchecked(manifest: Manifest) -> None:
    """Let any version be named."""


def promote(
    store: Store,
    version: int,
    *,
    channel: str,
    actor: str,
    reason: str,
    after: int | None = None,
    check: Check = unchecked,
) -> ChannelRecord:
    return _move(
        store,
        channel,
        lambda: version,
        mode="follow",
        actor=actor,
        reason=reason,
        after=after,
        check=check,
    )


def promote_or_explain(
    store: Store,
    manifest: Manifest,
    *,
    head: ChannelRecord | None,
    channel: str,
    actor: str,
    reason: str,
) -> str | None:
    """Promote a version unless its gate, a pin or a later move of the channel is against it.

    `head` is the channel's record from before the work on the version began. Return None, or the
    reason against the promotion and the next step.
    """
    number, gate = manifest.version, manifest.metrics.gate
    by_hand = f"`dne-store promote {number} --channel {channel}` would promote it"
    if gate is not None and gate.reasons and not gate.forced:
        return f"the gate refused it: {'; '.join(gate.reasons)}; {by_hand}"
    if head is not None and head.mode == "pin":
        return f"channel {channel} is pinned to version {head.target}; {by_hand}"
    after = head.number if head else 0
    try:
        store.promote(number, channel=channel, actor=actor, reason=reason, after=after)
    except ChannelMoved:
        return (
            f"channel {channel} has moved meanwhile, so version {number} is a branch; {by_hand}, "
            "and running the same command again starts from the new head"
        )
    return None


def rollback(
    store: Store,
    *,
    channel: str,
    to: int | None,
    actor: str,
    reason: str,
    after: int | None = None,
    check: Check = unchecked,
) -> ChannelRecord:
    _check_names_something(store, channel)
    return _move(
        store,
        channel,
        # With `to` a damaged history does not stand in the way.
        lambda: _target_before(store, channel) if to is None else to,
        mode="pin",
        actor=actor,
        reason=reason,
        after=after,
        check=check,
    )


def resume(
    store: Store, *, channel: str, actor: str, reason: str, check: Check = unchecked
) -> ChannelRecord:
    _check_names_something(store, channel)
    return _move(
        store,
        channel,
        lambda: resume_target(store.history(channel)),
        mode="follow",
        actor=actor,
        reason=reason,
        check=check,
    )


def _target_before(store: Store, channel: str) -> int:
    deleted = deleted_versions(store.objects)
    return rollback_target(store.history(channel), deleted=deleted)


def _check_names_something(store: Store, channel: str) -> None:
    if not store.record_numbers(channel):
        raise ChannelNotFound(f"channel {channel} names no version yet; promote one first")


def _newest(store: Store, channel: str) -> int:
    """Find the number that the next record follows; 0 where there is none. Raise ChannelBroken
    where none can follow. Records without a gap are not read: a damaged record must not keep a
    channel from moving on."""
    numbers = store.record_numbers(channel)
    newest = max(numbers, default=0)
    if newest != len(numbers):
        store.head(channel)
    if newest >= MAX_VERSION:
        name = record_name(channel, newest)
        raise ChannelBroken(name, "no record can follow it", channel=channel)
    return newest


def _move(
    store: Store,
    channel: str,
    target: Callable[[], int],
    *,
    mode: Mode,
    actor: str,
    reason: str,
    check: Check,
    after: int | None = None,
) -> ChannelRecord:
    for _ in range(MAX_CONFLICTS):
        # Listed before the target is chosen: a record that comes in between is a conflict,
        # and the target is chosen again.
        newest = _newest(store, channel)
        if after not in (None, newest):
            done = "promoted" if mode == "follow" else "returned to"
            raise ChannelMoved(
                f"channel {channel} was moved by someone else, so version {target()} was not {done}"
            )
        named = store.manifest(target())
        check(named)
        record = _append(
            store, channel, newest + 1, named=named, mode=mode, actor=actor, reason=reason
        )
        if record is not None:
            return record
    raise WriteFailed(
        f"no free record number could be taken in channel {channel}: "
        f"{record_name(channel, newest + 1)} is in the way, or others move it all the time; "
        "`dne-store verify` tells"
    )


def _append(
    store: Store, channel: str, number: int, *, named: Manifest, mode: Mode, actor: str, reason: str
) -> ChannelRecord | None:
    """Create a record; return None where its number is taken."""
    with refusing_bad_fields():
        record = ChannelRecord(
            channel=channel,
            number=number,
            target=named.version,
            target_digest=named.digest,
            mode=mode,
            actor=actor,
            reason=reason,
            time=timestamp(),
            transaction=uuid.uuid4().hex,
        )
    if not create_record(store.objects, record_name(channel, number), record):
        return None
    if store.is_deleted(named.version):
        _retreat(store, record)
    return record


def _retreat(store: Store, record: ChannelRecord) -> NoReturn:
    """Name the version before again: the target was deleted while the record was written. A
    deletion looks for records after it wrote its tombstone, so one of the two sees the other."""
    if record.number > 1:
        ours = store.record(record.channel, record.number - 1).model_copy(
            update={
                "number": record.number + 1,
                "actor": record.actor,
                "reason": f"version {record.target} was deleted meanwhile",
                "time": timestamp(),
                "transaction": uuid.uuid4().hex,
            }
        )
        # A taken number means that another one has moved on, which is as good.
        create_record(store.objects, record_name(ours.channel, ours.number), ours)
    raise VersionDeleted(record.target)
