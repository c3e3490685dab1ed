"""Open stores, read and publish versions, move channels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from model_store.backends.base import Entry, Objects
from model_store.backends.location import objects_at
from model_store.errors import StoreNotFound
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Draft, Manifest, Signs
from model_store.records.signing import NO_KEYS, Keys
from model_store.store.channel import Channel, newest_records
from model_store.store.making import make_store
from model_store.store.reserve import hold_back, using_reserve
from model_store.store.versions import Versions

if TYPE_CHECKING:
    from model_store.records.signing import Trust
    from model_store.store.verify import VerifyReport


class Store(Versions):
    """Versions, shards and channels in one place. Nothing that was written is ever changed."""

    @classmethod
    def open(cls, location: str, *, objects: Objects | None = None, keys: Keys = NO_KEYS) -> Store:
        """Open the store at `location`. Raise StoreNotFound where there is none."""
        return cls(objects or objects_at(location), location=location, keys=keys)

    @classmethod
    def create(
        cls, location: str, *, objects: Objects | None = None, keys: Keys = NO_KEYS
    ) -> Store:
        """Open the store at `location`, and make it where there is none."""
        objects = objects or objects_at(location)
        try:
            store = cls(objects, location=location, keys=keys)
        except StoreNotFound:
            make_store(objects)
            store = cls(objects, location=location, keys=keys)
        hold_back(objects)
        return store

    @contextmanager
    def using_reserve(self) -> Iterator[Store]:
        """Yield this store for housekeeping: its writes may use the reserve."""
        with using_reserve(self.objects) as objects:
            yield Store(objects, location=self.location, keys=self.keys)

    def publish(
        self, draft: Draft, *, shards: Mapping[str, bytes], signer: Signs | None = None
    ) -> Manifest:
        """Publish a version, visible all at once or not at all. No channel names it yet.

        `shards` holds, by SHA-256, the shards that the parent does not have. With a `signer` the
        manifest is signed, unless the gate refused the version and nobody forced it.
        """
        from model_store.store.publish import publish_draft  # reading a store starts without it

        return publish_draft(self, draft, shards=shards, signer=signer)

    def announce(self, transaction: str, *, parent: int | None, digests: Collection[str]) -> None:
        """Keep shards from housekeeping until the version with that transaction is published, the
        announcement is withdrawn, or it expires. `publish` announces by itself."""
        from model_store.store.reservations import announce

        announce(self.objects, transaction, parent=parent, digests=digests)

    def withdraw(self, transaction: str) -> None:
        """End an announced run that has no version."""
        from model_store.store.reservations import withdraw

        withdraw(self.objects, transaction)

    # Channels

    def channel(self, name: str) -> Channel:
        return Channel(self, name)

    def channels(self) -> list[str]:
        """List the names of all channels that have a record, in alphabetical order."""
        return list(self.newest_records())

    def newest_records(self) -> dict[str, int]:
        """Map each channel to the number of its newest record, from one listing."""
        return newest_records(self.objects)

    def record(self, channel: str, number: int) -> ChannelRecord:
        return self.channel(channel).record(number)

    def has_record(self, channel: str, number: int) -> bool:
        return self.channel(channel).has_record(number)

    def head(self, channel: str, *, since: int = 1) -> ChannelRecord | None:
        return self.channel(channel).head(since=since)

    def history(self, channel: str) -> list[ChannelRecord]:
        return self.channel(channel).history()

    def record_numbers(self, channel: str) -> list[int]:
        return self.channel(channel).record_numbers()

    def record_entries(self, channel: str, *, since: int) -> dict[int, Entry]:
        return self.channel(channel).record_entries(since=since)

    def promote(
        self, version: int, *, channel: str, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.channel(channel).promote(version, actor=actor, reason=reason, after=after)

    def rollback(
        self, *, channel: str, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.channel(channel).rollback(to=to, actor=actor, reason=reason, after=after)

    def resume(self, *, channel: str, actor: str, reason: str) -> ChannelRecord:
        return self.channel(channel).resume(actor=actor, reason=reason)

    def verify(self, version: int | None = None, *, trust: Trust | None = None) -> VerifyReport:
        """Check everything, or the objects that one version stands on; with `trust` also the
        signers."""
        from model_store.store.verify import verify_store

        return verify_store(self, version, trust=trust)
