"""Define channel records, and find the targets of a rollback and of a resume.

A channel is a movable name for a version: an append-only list of records.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from model_store.errors import NothingToRollBack, RecordInvalid, WrongUsage
from model_store.records.sealing import (
    FORMAT,
    Sha256,
    SignedRecord,
    Text,
    Timestamp,
    Transaction,
    Version,
    unseal_record,
)

Mode = Literal["follow", "pin"]
_CHANNEL_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
ChannelName = Annotated[str, Field(pattern=_CHANNEL_PATTERN)]


class ChannelRecord(SignedRecord):
    """One move of a channel. With mode `follow` training promotes new versions; with mode `pin`,
    a rollback, the channel stays."""

    signed_kind: ClassVar[str] = "channel"
    format: Literal[1] = FORMAT
    channel: ChannelName
    number: Version
    target: Version
    target_digest: Sha256
    mode: Mode
    actor: Text
    reason: Text
    time: Timestamp
    transaction: Transaction
    """Chosen at random for this one move, so that its writer recognises it after a lost reply."""


def decode_record(name: str, sealed: bytes, *, channel: str, number: int) -> ChannelRecord:
    """Read a sealed channel record, and check that it is the record of that name."""
    record = unseal_record(name, sealed, ChannelRecord)
    if (record.channel, record.number) != (channel, number):
        raise RecordInvalid(name, f"it says it is record {record.number} of {record.channel}")
    return record


def rollback_target(history: Sequence[ChannelRecord], *, deleted: Collection[int] = ()) -> int:
    """Find the version that the channel named before the current one. A second rollback goes
    back one more. Versions that were deleted since are skipped."""
    trail = _trail(history)
    earlier = [target for target in trail[:-1] if target not in {*deleted, trail[-1]}]
    if not earlier:
        raise NothingToRollBack(
            "there is no earlier version to roll back to; name one with --to"
            if history
            else "the channel names no version yet"
        )
    return earlier[-1]


def resume_target(history: Sequence[ChannelRecord]) -> int:
    """Find the version that was followed last, before the rollbacks."""
    if not history or history[-1].mode == "follow":
        raise NothingToRollBack("the channel is not rolled back; there is nothing to resume")
    followed = [record.target for record in history if record.mode == "follow"]
    if not followed:
        raise NothingToRollBack("the channel has never followed a version; promote one instead")
    return followed[-1]


def _trail(history: Sequence[ChannelRecord]) -> list[int]:
    """Walk to the current target: promotions push, rollbacks pop, resuming undoes the pops."""
    trail: list[int] = []
    followed: list[int] = []
    for record in history:
        if record.mode == "pin":
            trail = (
                trail[: len(trail) - trail[::-1].index(record.target)]  # up to its last place
                if record.target in trail
                else [*trail, record.target]
            )
            continue
        resumed = bool(followed) and followed[-1] == record.target
        if resumed:
            trail = list(followed)
        elif not trail or trail[-1] != record.target:
            trail.append(record.target)
        followed = list(trail)
    return trail


def check_channel_name(name: str) -> str:
    """Raise WrongUsage for text that cannot name a channel."""
    if not re.fullmatch(_CHANNEL_PATTERN, name):  # `match` would let a final newline through
        raise WrongUsage(
            f"{name!r} is not a channel name: small letters, digits, '-' and '_', at most 63"
        )
    return name
