"""Open stores, read and publish versions, move channels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from model_store.backends.base import Entry, ObjectMissing, ObjectRefused, Objects, keyed, parsed
from model_store.backends.location import objects_at
from model_store.errors import (
    ChannelBroken,
    RecordInvalid,
    ShardCorrupt,
    ShardForgotten,
    ShardMissing,
    StoreNotFound,
    StoreUnsupported,
    VersionDeleted,
    VersionNotFound,
)
from model_store.layout import (
    CHANNELS,
    STORE,
    VERSIONS,
    record_name,
    record_of,
    shard_name,
    version_name,
    version_of,
)
from model_store.records.channel import (
    ChannelRecord,
    check_channel_name,
    decode_record,
)
from model_store.records.fields import MAX_VERSION
from model_store.records.manifest import Draft, Manifest, ShardRef, Signs, decode
from model_store.records.sealing import read_record, read_sealed
from model_store.records.tombstone import (
    FORGETTABLE,
    forgotten_shards,
    read_deleted,
    read_forgotten,
)
from model_store.store import channel_moves as moves
from model_store.store.cache import shard_cache
from model_store.store.making import StoreRecord, make_store
from model_store.store.reserve import hold_back, using_reserve
from model_store.store.shard import check_digest

if TYPE_CHECKING:
    from model_store.records.signing import Trust
    from model_store.store.verify import VerifyReport

MAX_SHARD_BYTES = 1 << 34  # twice the largest network that a spec allows, in float32


class Store:
    """Versions, shards and channels in one place. Nothing that was written is ever changed."""

    def __init__(self, objects: Objects, *, location: str) -> None:
        self.objects = objects
        self.location = location
        self.cache = shard_cache(location)
        self.id = self.read_id()

    @classmethod
    def open(cls, location: str, *, objects: Objects | None = None) -> Store:
        """Open the store at `location`. Raise StoreNotFound where there is none."""
        return cls(objects or objects_at(location), location=location)

    @classmethod
    def create(cls, location: str, *, objects: Objects | None = None) -> Store:
        """Open the store at `location`, and make it where there is none."""
        objects = objects or objects_at(location)
        try:
            store = cls(objects, location=location)
        except StoreNotFound:
            make_store(objects)
            store = cls(objects, location=location)
        hold_back(objects)
        return store

    @contextmanager
    def using_reserve(self) -> Iterator[Store]:
        """Yield this store for housekeeping: its writes may use the reserve."""
        with using_reserve(self.objects) as objects:
            yield Store(objects, location=self.location)

    def read_id(self) -> str:
        """Read the id of the store. Raise StoreNotFound where there is no store."""
        try:
            return read_record(self.objects, STORE, StoreRecord).id
        except ObjectMissing as error:
            raise StoreNotFound(f"there is no store at {self.location}") from error

    # Versions and shards

    def versions(self) -> list[int]:
        """List the numbers of all versions, ascending."""
        return sorted(parsed(self.objects.list_names(VERSIONS), version_of))

    def version_entries(self, *, since: int) -> dict[int, Entry]:
        """List the manifests from a number on, without reading them."""
        entries = self.objects.list(VERSIONS, after=version_name(since - 1))
        return keyed(entries, version_of)

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def manifest(self, version: int) -> Manifest:
        """Read a version's manifest. An error names the newest version, which takes a listing."""
        try:
            return self.read_manifest(version)
        except VersionDeleted:
            raise
        except VersionNotFound as error:
            newest = self.newest()
            hint = f"the newest is {newest}" if newest is not None else "the store is empty"
            raise VersionNotFound(version, hint=hint) from error

    def read_manifest(self, version: int) -> Manifest:
        """Read a manifest; an error says nothing about the rest of the store."""
        name = version_name(version)
        try:
            if not 1 <= version <= MAX_VERSION:
                raise ObjectMissing(name)
            return decode(name, read_sealed(self.objects, name), version=version)
        except ObjectMissing as error:
            if self.is_deleted(version):
                raise VersionDeleted(version) from error
            raise VersionNotFound(version) from error

    def parent_of(self, manifest: Manifest) -> Manifest | None:
        """Read the nearest ancestor that was not deleted; None where there is none."""
        parent = manifest.parent
        while parent is not None:
            try:
                return self.manifest(parent)
            except VersionDeleted:
                tombstone = read_deleted(self.objects, parent)
                parent = tombstone.parent if tombstone else None
        return None

    def is_deleted(self, version: int) -> bool:
        """Tell whether a tombstone holds the place of that version."""
        return 1 <= version <= MAX_VERSION and read_deleted(self.objects, version) is not None

    def read_shard(self, ref: ShardRef) -> bytes:
        """Read a shard, and check its size and SHA-256. Parse these very bytes. Shards of a distant
        store may come from the local cache."""
        if self.cache is None:
            return self.read_stored_shard(ref)
        return self.cache.read(ref, fetch=self.read_stored_shard)

    def read_stored_shard(self, ref: ShardRef) -> bytes:
        """Read a shard as `read_shard` does, from the store itself and never from a cache."""
        if ref.bytes > MAX_SHARD_BYTES:
            raise ShardCorrupt(ref.sha256, f"it claims more than {MAX_SHARD_BYTES} bytes")
        try:
            data = self.objects.read(shard_name(ref.sha256), max_bytes=ref.bytes)
        except ObjectMissing as error:
            tombstone = read_forgotten(self.objects, ref.sha256)
            if tombstone is not None and ref.kind in FORGETTABLE:
                raise ShardForgotten(ref.sha256, class_name=tombstone.class_name) from error
            raise ShardMissing(ref.sha256) from error
        except ObjectRefused as error:
            raise ShardCorrupt(ref.sha256, error.reason) from error
        check_digest(ref, data)
        return data

    def publish(
        self, draft: Draft, *, shards: Mapping[str, bytes], signer: Signs | None = None
    ) -> Manifest:
        """Publish a version, visible all at once or not at all. No channel names it yet.

        `shards` holds, by SHA-256, the shards that the parent does not have. With a `signer` the
        manifest is signed.
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

    def forgotten(self) -> frozenset[str]:
        """List the digests of image shards that were forgotten."""
        return forgotten_shards(self.objects)

    # Channels

    def channels(self) -> list[str]:
        """List the names of all channels that have a record, in alphabetical order."""
        return list(self.newest_records())

    def newest_records(self) -> dict[str, int]:
        """Map each channel to the number of its newest record, from one listing."""
        return dict(sorted(parsed(self.objects.list_names(CHANNELS), record_of)))

    def record(self, channel: str, number: int) -> ChannelRecord:
        """Read one record of a channel."""
        name = record_name(channel, number)
        try:
            sealed = read_sealed(self.objects, name)
        except ObjectMissing as error:
            raise RecordInvalid(name, "it is not there") from error
        return decode_record(name, sealed, channel=channel, number=number)

    def has_record(self, channel: str, number: int) -> bool:
        """Tell whether there is something under the name of a record, with one request."""
        try:
            read_sealed(self.objects, record_name(channel, number))
        except ObjectMissing:
            return False
        except RecordInvalid:  # what is there cannot be read as a record, and a look will say so
            pass
        return True

    def head(self, channel: str, *, since: int = 1) -> ChannelRecord | None:
        """Read the newest record of a channel, with one listing and one read. A caller who has seen
        record `since` lists only later ones: a bucket lists 1,000 names with a request."""
        numbers = sorted(self.record_entries(channel, since=since)) if since > 1 else []
        if not numbers:
            since, numbers = 1, self.record_numbers(channel)
        if not numbers:
            return None
        try:
            return self.record(channel, numbers[-1])
        except (RecordInvalid, StoreUnsupported) as error:
            if numbers[-1] == since + len(numbers) - 1:
                raise
            reason = f"records before it are missing, and it is none itself ({error})"
            name = record_name(channel, numbers[-1])
            raise ChannelBroken(name, reason, channel=channel) from error

    def resolve(self, record: ChannelRecord) -> Manifest:
        """Read the manifest that `record` was written for, and no other of the same number."""
        manifest = self.read_manifest(record.target)
        if manifest.digest != record.target_digest:
            raise RecordInvalid(
                record_name(record.channel, record.number),
                f"it names another version {record.target} than the one that is there",
            )
        return manifest

    def history(self, channel: str) -> list[ChannelRecord]:
        """Read all records of a channel, oldest first."""
        return [self.record(channel, number) for number in self.record_numbers(channel)]

    def record_numbers(self, channel: str) -> list[int]:
        """List the numbers of a channel's records, ascending."""
        names = self.objects.list_names(f"{CHANNELS}/{check_channel_name(channel)}")
        return sorted(number for _, number in parsed(names, record_of))

    def record_entries(self, channel: str, *, since: int) -> dict[int, Entry]:
        """List a channel's records from a number on, without reading them."""
        folder = f"{CHANNELS}/{check_channel_name(channel)}"
        entries = self.objects.list(folder, after=record_name(channel, since - 1))
        return {number: entry for (_, number), entry in keyed(entries, record_of).items()}

    def promote(
        self, version: int, *, channel: str, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        """Let a channel name `version` and follow on from it.

        With `after`, raise ChannelMoved unless the channel's newest record has that number (0: it
        has none).
        """
        return moves.promote(
            self, version, channel=channel, actor=actor, reason=reason, after=after
        )

    def rollback(
        self, *, channel: str, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        """Let a channel name `to`, or the version before the current one, and stay there. `after`
        is that of `promote`."""
        return moves.rollback(self, channel=channel, to=to, actor=actor, reason=reason, after=after)

    def resume(self, *, channel: str, actor: str, reason: str) -> ChannelRecord:
        """Let a channel name the version again that it followed before it was rolled back."""
        return moves.resume(self, channel=channel, actor=actor, reason=reason)

    def verify(self, version: int | None = None, *, trust: Trust | None = None) -> VerifyReport:
        """Check everything, or the objects that one version stands on; with `trust` also the
        signers."""
        from model_store.store.verify import verify_store

        return verify_store(self, version, trust=trust)
