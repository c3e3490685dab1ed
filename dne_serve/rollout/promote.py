"""Move the channel through this server: load the target first, and append the record after that.

A record must not name a version that cannot be loaded: restarted servers would look for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dne_serve.engines.base import Resident
from dne_serve.errors import NotMoved, tell
from dne_serve.rollout.residents import Residents
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.store import channel_moves as moves
from model_store.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The record that was appended, and the version that it names, in memory."""

    record: ChannelRecord
    resident: Resident


class Mover:
    """The three moves of one channel."""

    def __init__(
        self, open_store: Callable[[], Store], *, residents: Residents, channel: str
    ) -> None:
        self._open_store = open_store
        self._residents = residents
        self._channel = channel

    def promote(self, to: int, *, actor: str, reason: str) -> Moved:
        return self._move(partial(moves.promote, version=to), actor=actor, reason=reason)

    def rollback(
        self, *, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> Moved:
        move = partial(moves.rollback, to=to, after=after)
        return self._move(move, actor=actor, reason=reason)

    def resume(self, *, actor: str, reason: str) -> Moved:
        return self._move(moves.resume, actor=actor, reason=reason)

    def _move(self, append: Callable[..., ChannelRecord], *, actor: str, reason: str) -> Moved:
        store, loaded = self._open_store(), list[Resident]()
        record = append(
            store,
            channel=self._channel,
            actor=actor,
            reason=reason,
            # The list keeps the version, which the residents may let go of meanwhile.
            check=lambda manifest: loaded.append(self._load(manifest, store)),
        )
        return Moved(record=record, resident=loaded[-1])

    def _load(self, manifest: Manifest, store: Store) -> Resident:
        try:
            return self._residents.load(manifest, shards=store, needed=True)
        except Exception as error:
            raise NotMoved(
                f"this server cannot load version {manifest.version}, so channel {self._channel} "
                f"was not moved: {tell(error)}"
            ) from error


@dataclass(frozen=True, slots=True)
class RecordMover:
    """A mover in the form that the guard takes: the channel is known, and the record is enough."""

    mover: Mover

    def rollback(
        self, *, channel: str, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.mover.rollback(to=to, actor=actor, reason=reason, after=after).record
