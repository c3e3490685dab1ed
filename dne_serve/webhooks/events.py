"""Define the events that are posted, as CloudEvents 1.0, and notice when there is one.

The id follows from the store: all servers of a channel give the same event the same id. A thread
looks at what the reloader has seen; neither the reloader nor the request path knows of it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import islice, takewhile

from model_store.errors import RecordInvalid, StoreUnsupported, VersionNotFound
from model_store.loop.index import Index
from model_store.loop.item_names import time_of
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.records.sealing import timestamp
from model_store.store.store import Store

MEDIA_TYPE = "application/cloudevents+json"
GUARD = "guard:"
"""Start of the actor of a record that the guard has written."""
_MOST_REASONS = 20


class _EventType(StrEnum):
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
    kind = _EventType.RESUMED if resumed else _EventType.PROMOTED
    if record.mode == "pin":
        by_guard = record.actor.startswith(GUARD)
        kind = _EventType.GUARDED if by_guard else _EventType.ROLLED_BACK
    return _of_channel(
        record,
        store_id=store_id,
        type=kind,
        time=record.time,
        data={
            "previous": before.target if before else None,
            "mode": record.mode,
            "actor": record.actor,
            "reason": record.reason,
        },
    )


def not_loaded(failure: NotLoaded, *, store_id: str) -> Event:
    """Make the event of a version that the channel names and a server cannot load."""
    return _of_channel(
        failure.record,
        store_id=store_id,
        type=_EventType.NOT_LOADED,
        time=timestamp(),
        data={"error": failure.error, "serving": failure.serving},
        about="/not_loaded",
    )


def refused(manifest: Manifest, *, store_id: str) -> Event | None:
    """Make the event of a version that the gate refused; None for any other version."""
    gate = manifest.metrics.gate
    if gate is None or gate.passed or gate.forced:
        return None
    return Event(
        id=f"{store_id}/versions/{manifest.version}/refused",
        type=_EventType.REFUSED,
        source=f"/stores/{store_id}",
        subject=f"versions/{manifest.version}",
        time=manifest.created,
        data={
            "version": manifest.version,
            "parent": manifest.parent,
            "reasons": list(gate.reasons[:_MOST_REASONS]),
        },
    )


def filled(item: str, *, bound: int, waiting: int, store_id: str) -> Event:
    """Make the event of an inbox in which many pictures wait. `item` was the one too many."""
    return Event(
        id=f"{store_id}/inbox/{item}/{bound}",
        type=_EventType.INBOX_FILLED,
        source=f"/stores/{store_id}/inbox",
        subject="inbox",
        time=timestamp(),
        data={"waiting": waiting, "bound": bound},
    )


def _of_channel(
    record: ChannelRecord,
    *,
    store_id: str,
    type: _EventType,
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


LOOK_S = 60.0
"""Time between two looks: each lists the inbox."""


class InboxNews:
    """Make an event when as many pictures wait as `bound` says. The next one can come after their
    number has been below half of that: each label at the bound would make one otherwise."""

    def __init__(
        self,
        open_index: Callable[[], Index],
        *,
        bound: int,
        announce: Callable[[Event], None],
        recent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_index = open_index
        self._bound = bound
        self._announce = announce
        self._recent = timedelta(seconds=recent_s)
        self._clock = clock
        self._look_at = 0.0
        self._is_told: bool | None = None
        """None before the first look, which tells only what has happened recently."""

    def look(self, *, store_id: str) -> None:
        """Return whether the number is reached, unless the last look was a moment ago."""
        if self._clock() < self._look_at:
            return
        index = self._open_index()
        index.refresh()
        self._look_at = self._clock() + LOOK_S
        reached_by = index.waiting(self._bound)
        if reached_by is None:
            half_waits = index.waiting(max(1, self._bound // 2)) is not None
            self._is_told = bool(self._is_told) and half_waits
            return
        is_news = datetime.now(UTC) - time_of(reached_by) < self._recent
        if self._is_told is False or (self._is_told is None and is_news):
            waiting = index.counts()["unlabelled"]
            self._announce(
                filled(reached_by, bound=self._bound, waiting=waiting, store_id=store_id)
            )
        self._is_told = True


RECENT_S = 600.0
"""Age up to which records and versions that are found at the start are told. A server that was
restarted may not have told them, and receivers know the others by their ids."""
_MOST_AT_ONCE = 20
"""Records, or versions, that one look tells at most; the newest are told."""
_MOST_BACK = 50
"""Records read at most, to find those that were not told and the one before a rollback."""
_MAX_TICK_S = 1.0
_MAX_REST_S = 30.0
_LAST_LOOK_S = 1.0
UNREADABLE = (RecordInvalid, StoreUnsupported, VersionNotFound)

log = logging.getLogger("dne_serve.webhooks")


class ChannelNews:
    """A thread that makes events of one channel, and of the versions of its store."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        head: Callable[[], ChannelRecord | None],
        failed: Callable[[], NotLoaded | None],
        announce: Callable[[Event], None],
        tick_s: float,
        look_every_s: float,
        inbox: InboxNews | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`head` and `failed` ask no store, and are called every tick. Versions are listed every
        `look_every_s`."""
        self._open_store = open_store
        self._head = head
        self._failed = failed
        self._announce = announce
        self._tick_s = min(_MAX_TICK_S, tick_s)
        self._look_every_s = look_every_s
        self._inbox = inbox
        self._clock = clock
        self._told: int | None = None
        """Number of the newest record that was told."""
        self._told_failed: ChannelRecord | None = None
        self._newest: int | None = None
        """Number of the newest version that was looked at."""
        self._list_at = 0.0
        self._rest_until = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and do not wait for a store that hangs."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_LOOK_S)

    def look(self) -> None:
        """Post what is new. After a fault of the store, wait and try again."""
        if self._clock() < self._rest_until:
            return
        try:
            self._tell_moves()
            self._tell_failed()
            if self._clock() >= self._list_at:
                self._list_at = self._clock() + self._look_every_s
                self._tell_refused()
                if self._inbox is not None:
                    self._inbox.look(store_id=self._open_store().id)
        except Exception as error:  # a thread that ends would be silent for ever
            log.warning("no events can be made at the moment: %s", error)
            log.debug("the fault of the events", exc_info=error)
            self._rest_until = self._clock() + min(_MAX_REST_S, self._look_every_s)

    def _loop(self) -> None:
        while not self._stopping.wait(self._tick_s):
            self.look()
        self.look()

    def _tell_moves(self) -> None:
        head = self._head()
        if head is None or head.number == self._told:
            return
        store = self._open_store()
        for record in self._untold(store, head):
            self._announce(_moved(store, record))
            self._told = record.number
        self._told = head.number

    def _untold(self, store: Store, head: ChannelRecord) -> list[ChannelRecord]:
        """Read the records up to the head that were not told, oldest first."""
        if self._told is not None and head.number < self._told:
            return []  # the store was mended or brought back from a backup
        past = islice(_back_from(store, head), _MOST_AT_ONCE)
        told = self._told
        if told is None:
            untold = takewhile(lambda record: _is_recent(record.time), past)
        else:
            untold = takewhile(lambda record: record.number > told, past)
        return [*untold][::-1]

    def _tell_failed(self) -> None:
        failed = self._failed()
        if failed is None or failed.record == self._told_failed:
            return
        self._announce(not_loaded(failed, store_id=self._open_store().id))
        self._told_failed = failed.record

    def _tell_refused(self) -> None:
        store = self._open_store()
        entries = store.version_entries(since=(self._newest or 0) + 1)
        manifests = _manifests(store, sorted(entries, reverse=True)[:_MOST_AT_ONCE])
        if self._newest is None:
            manifests = takewhile(lambda manifest: _is_recent(manifest.created), manifests)
        for manifest in [*manifests][::-1]:
            event = refused(manifest, store_id=store.id)
            if event is not None:
                self._announce(event)
        self._newest = max(entries, default=self._newest or 0)


def _moved(store: Store, record: ChannelRecord) -> Event:
    past = islice(_back_from(store, record), 1, None)
    before = next(past, None)
    resumed = False
    if record.mode == "follow" and before is not None and before.mode == "pin":
        followed = next((older for older in past if older.mode == "follow"), None)
        resumed = followed is not None and followed.target == record.target
    return moved(record, store_id=store.id, before=before, resumed=resumed)


def _back_from(store: Store, record: ChannelRecord) -> Iterator[ChannelRecord]:
    """Yield a record and those before it, newest first. Those that cannot be read are left out."""
    yield record
    for number in range(record.number - 1, max(0, record.number - 1 - _MOST_BACK), -1):
        try:
            yield store.record(record.channel, number)
        except UNREADABLE as error:
            log.warning("a record is skipped: %s", error)


def _manifests(store: Store, versions: Iterable[int]) -> Iterator[Manifest]:
    """Read manifests. Those that cannot be read are left out."""
    for version in versions:
        try:
            yield store.read_manifest(version)
        except UNREADABLE as error:
            log.warning("version %s is skipped: %s", version, error)


def _is_recent(time: str) -> bool:
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(time)
    except ValueError:  # the form of a time is checked when a record is read, and its month is not
        return False
    return age.total_seconds() < RECENT_S
