"""Moves the channel through this server: the target is loaded first, and only then recorded.

A version that cannot be loaded must not be named: every server that restarts would look for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    def __init__(
        self, open_store: Callable[[], Store], *, residents: Residents, channel: str
    ) -> None:
        self._open_store = open_store
        self._residents = residents
        self._channel = channel

    def promote(self, to: int, *, actor: str, reason: str) -> Moved:
        loading = self._loading()
        return loading.moved(
            moves.promote(
                loading.store,
                to,
                channel=self._channel,
                actor=actor,
                reason=reason,
                check=loading.load,
            )
        )

    def rollback(
        self, *, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> Moved:
        loading = self._loading()
        return loading.moved(
            moves.rollback(
                loading.store,
                channel=self._channel,
                to=to,
                actor=actor,
                reason=reason,
                after=after,
                check=loading.load,
            )
        )

    def resume(self, *, actor: str, reason: str) -> Moved:
        loading = self._loading()
        return loading.moved(
            moves.resume(
                loading.store,
                channel=self._channel,
                actor=actor,
                reason=reason,
                check=loading.load,
            )
        )

    def _loading(self) -> _Loading:
        return _Loading(store=self._open_store(), residents=self._residents, channel=self._channel)


@dataclass(slots=True, kw_only=True)
class _Loading:
    """One move. It holds on to the version, which the residents may let go of meanwhile."""

    store: Store
    residents: Residents
    channel: str
    resident: Resident | None = None

    def load(self, manifest: Manifest) -> None:
        try:
            self.resident = self.residents.load(manifest, shards=self.store, needed=True)
        except Exception as error:
            raise NotMoved(
                f"this server cannot load version {manifest.version}, so channel {self.channel} "
                f"was not moved: {tell(error)}"
            ) from error

    def moved(self, record: ChannelRecord) -> Moved:
        assert self.resident is not None  # no record is written without a check
        return Moved(record=record, resident=self.resident)


@dataclass(frozen=True, slots=True)
class RecordMover:
    """A mover as the guard asks for it: the channel is known, and the record is enough."""

    mover: Mover

    def rollback(
        self, *, channel: str, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.mover.rollback(to=to, actor=actor, reason=reason, after=after).record
