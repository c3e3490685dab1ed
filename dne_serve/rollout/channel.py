"""Open the store that a server follows, check at every look that it is the same store, and read the
channel's past.

A directory that is not mounted looks like a store without versions, and another store in its place
looks like a channel that has moved. The server follows neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from dne_serve.engines.base import Resident
from dne_serve.errors import ChannelWentBack, NotMoved, StoreChanged, public_message
from dne_serve.rollout.loaded_versions import LoadedVersions
from model_store.errors import RecordInvalid, StoreNotFound
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.records.signing import NO_KEYS, Keys
from model_store.store.channel import Channel
from model_store.store.store import Store

MAX_FALLBACKS = 8
"""Versions tried in place of a head that cannot be loaded, newest first."""
_MAX_RECORDS_BACK = 200
"""Records read to find fallbacks: most of a long history names versions tried already."""

log = logging.getLogger("dne_serve.reloader")


class SameStore:
    """The store at a location, opened by the first call that finds one. Later calls read
    `store.json` again, which is small, and raise StoreChanged unless it names the same store."""

    def __init__(self, location: str, *, keys: Keys = NO_KEYS) -> None:
        self._location = location
        self._keys = keys
        self._store: Store | None = None

    def __call__(self) -> Store:
        store = self._store
        if store is None:
            opened = Store.open(self._location, keys=self._keys)
            self._store = store = self._store or opened  # another thread may have been faster
            return store
        try:
            store_id = store.read_id()
        except StoreNotFound as error:
            raise StoreChanged(
                "the store has vanished: its store.json is not there; bring the store back, or "
                "restart this server to wait for another one"
            ) from error
        if store_id != store.id:
            raise StoreChanged(
                f"another store (id {store_id[:8]}…) has replaced the one that this server follows "
                f"(id {store.id[:8]}…); bring that one back, or restart this server to follow the "
                "other"
            )
        return store

    def made(self) -> Store:
        """Open the store as a call does, and make it where there has been none yet."""
        try:
            return self()
        except StoreNotFound:
            Store.create(self._location, keys=self._keys)
            return self()


def check_onward(
    channel: str, *, seen: ChannelRecord | None, head: ChannelRecord | None, asked: bool
) -> None:
    """Raise ChannelWentBack unless `head` is the record seen last or a later one: records are only
    appended. `asked`: an administrator wants this head to be served, whatever was seen before."""
    if seen is None or (head is not None and asked):
        return
    if head is None:
        raise ChannelWentBack(
            f"channel {channel} has no record any more, and record {seen.number} was seen; bring "
            "the records back, or promote a version through this server"
        )
    if head.number < seen.number or (head.number == seen.number and head != seen):
        raise ChannelWentBack(
            f"channel {channel} went back to record {head.number}, and record {seen.number} was "
            "seen; bring the later records back, or move the channel through this server"
        )


def earlier_records(
    store: Store, channel: str, head: ChannelRecord | None
) -> Iterator[ChannelRecord]:
    """Yield the records before `head`, newest first. Unreadable records are passed over."""
    numbers = [n for n in store.record_numbers(channel) if head is None or n < head.number]
    for number in sorted(numbers, reverse=True)[:_MAX_RECORDS_BACK]:
        try:
            yield store.record(channel, number)
        except RecordInvalid as error:
            log.warning("an earlier record is skipped: %s", error)


def earlier_targets(
    store: Store, channel: str, head: ChannelRecord | None
) -> Iterator[ChannelRecord]:
    """Yield one record for each version named before `head`, newest first; all records if `head`
    is None. Unreadable records are passed over."""
    known = {head.target_digest} if head else set()
    for record in earlier_records(store, channel, head):
        if record.target_digest in known:
            continue
        if len(known) > MAX_FALLBACKS:
            return
        known.add(record.target_digest)
        yield record


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMove:
    """The record that was appended, and the version that it names, in memory."""

    record: ChannelRecord
    resident: Resident


class Mover:
    """The three moves of one channel."""

    def __init__(
        self, open_store: Callable[[], Store], *, loaded: LoadedVersions, channel: str
    ) -> None:
        self._open_store = open_store
        self._loaded = loaded
        self._channel = channel

    def promote(self, to: int, *, actor: str, reason: str, after: int | None = None) -> ChannelMove:
        move = partial(Channel.promote, version=to, after=after)
        return self._move(move, actor=actor, reason=reason)

    def rollback(
        self, *, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelMove:
        move = partial(Channel.rollback, to=to, after=after)
        return self._move(move, actor=actor, reason=reason)

    def resume(self, *, actor: str, reason: str) -> ChannelMove:
        return self._move(Channel.resume, actor=actor, reason=reason)

    def _move(
        self, append: Callable[..., ChannelRecord], *, actor: str, reason: str
    ) -> ChannelMove:
        store, loaded = self._open_store(), list[Resident]()
        record = append(
            store.channel(self._channel),
            actor=actor,
            reason=reason,
            # The list keeps the version, which may leave the loaded versions meanwhile.
            check=lambda manifest: loaded.append(self._load(manifest, store)),
        )
        return ChannelMove(record=record, resident=loaded[-1])

    def _load(self, manifest: Manifest, store: Store) -> Resident:
        try:
            return self._loaded.load(manifest, shards=store, needed=True)
        except Exception as error:
            raise NotMoved(
                f"this server cannot load version {manifest.version}, so channel {self._channel} "
                f"was not moved: {public_message(error)}"
            ) from error
