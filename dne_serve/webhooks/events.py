"""Define the events that are posted, as CloudEvents 1.0.

The id follows from the store: all servers of a channel give the same event the same id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.records.sealing import timestamp

MEDIA_TYPE = "application/cloudevents+json"
GUARD = "guard:"
"""Start of the actor of a record that the guard has written."""
MOST_REASONS = 20


class EventType(StrEnum):
    PROMOTED = "dne.channel.promoted"
    ROLLED_BACK = "dne.channel.rolled_back"
    RESUMED = "dne.channel.resumed"
    GUARDED = "dne.channel.guarded"
    NOT_LOADED = "dne.version.not_loaded"
    REFUSED = "dne.version.refused"
    INBOX_FILLED = "dne.inbox.filled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `source` and `id` together name it; `time` is in RFC 3339."""

    id: str
    type: str
    source: str
    subject: str
    time: str
    data: Mapping[str, object]

    def body(self) -> bytes:
        """Write the event in the structured mode of CloudEvents, in JSON."""
        attributes = {
            "specversion": "1.0",
            "id": self.id,
            "source": self.source,
            "type": self.type,
            "subject": self.subject,
            "time": self.time,
            "datacontenttype": "application/json",
            "data": self.data,
        }
        return json.dumps(attributes, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLoaded:
    """The channel's head that a server cannot load, the reason, and the version that it serves
    meanwhile."""

    record: ChannelRecord
    error: str
    serving: int | None


def moved(
    record: ChannelRecord, *, store_id: str, before: ChannelRecord | None, resumed: bool
) -> Event:
    """Make the event of a channel record. `before` is the record before it, if it can be read;
    `resumed`: the record ends a rollback."""
    return _of_channel(
        record,
        store_id=store_id,
        type=_type_of(record, resumed=resumed),
        time=record.time,
        data={
            "previous": before.target if before else None,
            "mode": record.mode,
            "actor": record.actor,
            "reason": record.reason,
        },
    )


def not_loaded(found: NotLoaded, *, store_id: str) -> Event:
    """Make the event of a version that the channel names and a server cannot load."""
    return _of_channel(
        found.record,
        store_id=store_id,
        type=EventType.NOT_LOADED,
        time=timestamp(),
        data={"error": found.error, "serving": found.serving},
        about="/not_loaded",
    )


def refused(manifest: Manifest, *, store_id: str) -> Event | None:
    """Make the event of a version that the gate refused; None for any other version."""
    gate = manifest.metrics.gate
    if gate is None or gate.passed or gate.forced:
        return None
    return Event(
        id=f"{store_id}/versions/{manifest.version}/refused",
        type=EventType.REFUSED,
        source=f"/stores/{store_id}",
        subject=f"versions/{manifest.version}",
        time=manifest.created,
        data={
            "version": manifest.version,
            "parent": manifest.parent,
            "reasons": list(gate.reasons[:MOST_REASONS]),
        },
    )


def filled(item: str, *, bound: int, waiting: int, store_id: str) -> Event:
    """Make the event of an inbox in which many pictures wait. `item` was the one too many."""
    return Event(
        id=f"{store_id}/inbox/{item}/{bound}",
        type=EventType.INBOX_FILLED,
        source=f"/stores/{store_id}/inbox",
        subject="inbox",
        time=timestamp(),
        data={"waiting": waiting, "bound": bound},
    )


def _type_of(record: ChannelRecord, *, resumed: bool) -> EventType:
    if record.mode == "pin":
        return EventType.GUARDED if record.actor.startswith(GUARD) else EventType.ROLLED_BACK
    return EventType.RESUMED if resumed else EventType.PROMOTED


def _of_channel(
    record: ChannelRecord,
    *,
    store_id: str,
    type: EventType,
    time: str,
    data: Mapping[str, object],
    about: str = "",
) -> Event:
    """Make an event about the version that a record names."""
    return Event(
        id=f"{store_id}/channels/{record.channel}/{record.number}{about}",
        type=type,
        source=f"/stores/{store_id}/channels/{record.channel}",
        subject=f"versions/{record.target}",
        time=time,
        data={
            "channel": record.channel,
            "version": record.target,
            "record": record.number,
            **data,
        },
    )
