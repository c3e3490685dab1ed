"""Read the versions of a store and their shards."""

from __future__ import annotations

from dataclasses import replace

from model_store.backends.base import Entry, ObjectMissing, ObjectRefused, Objects, keyed, parsed
from model_store.errors import (
    RecordInvalid,
    ShardCorrupt,
    ShardForgotten,
    ShardMissing,
    StoreNotFound,
    VersionDeleted,
    VersionNotFound,
)
from model_store.layout import (
    STORE,
    VERSIONS,
    record_name,
    shard_name,
    version_name,
    version_of,
)
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, ShardRef, decode
from model_store.records.sealing import (
    MAX_VERSION,
    read_record,
    read_sealed,
)
from model_store.records.signing import NO_KEYS, Keys
from model_store.records.tombstone import (
    FORGETTABLE,
    forgotten_shards,
    read_deleted,
    read_forgotten,
)
from model_store.store.alternates import MAX_SHARD_BYTES, Alternates, StoreRecord
from model_store.store.cache import shard_cache
from model_store.store.shard import check_digest


class VersionReader:
    """The versions and shards in one place. Nothing that was written is ever changed."""

    def __init__(self, objects: Objects, *, location: str, keys: Keys = NO_KEYS) -> None:
        """With `keys` channel records are signed, and only trusted ones are read."""
        self.objects = objects
        self.location = location
        self.cache = shard_cache(location)
        record = self._read_record()
        self.id = record.id
        self.alternates = Alternates(location, record)
        self.keys = replace(keys, store=self.id)

    def read_id(self) -> str:
        """Read the id of the store. Raise StoreNotFound where there is no store."""
        return self._read_record().id

    def _read_record(self) -> StoreRecord:
        try:
            return read_record(self.objects, STORE, StoreRecord)
        except ObjectMissing as error:
            raise StoreNotFound(f"there is no store at {self.location}") from error

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
        """Return whether a tombstone holds the place of that version."""
        return 1 <= version <= MAX_VERSION and read_deleted(self.objects, version) is not None

    def read_shard(self, ref: ShardRef) -> bytes:
        """Read a shard, and check its size and SHA-256. Parse these very bytes. Shards of a distant
        store may come from the local cache."""
        if self.cache is None:
            return self.read_stored_shard(ref)
        return self.cache.read(ref, fetch=self.read_stored_shard)

    def read_stored_shard(self, ref: ShardRef) -> bytes:
        """Read a shard as `read_shard` does, from the store itself or, for an expert that it has
        borrowed, from an alternate, and never from a cache."""
        if ref.bytes > MAX_SHARD_BYTES:
            raise ShardCorrupt(ref.sha256, f"it claims more than {MAX_SHARD_BYTES} bytes")
        try:
            data = self.objects.read(shard_name(ref.sha256), max_bytes=ref.bytes)
        except ObjectMissing as error:
            if ref.kind == "expert" and self.alternates.named:
                return self.alternates.read(ref)
            tombstone = read_forgotten(self.objects, ref.sha256)
            if tombstone is not None and ref.kind in FORGETTABLE:
                raise ShardForgotten(ref.sha256, class_name=tombstone.class_name) from error
            raise ShardMissing(ref.sha256) from error
        except ObjectRefused as error:
            raise ShardCorrupt(ref.sha256, error.reason) from error
        check_digest(ref, data)
        return data

    def borrow(self, ref: ShardRef) -> bool:
        """Return whether a version may name an expert that this store need not hold: an alternate
        has it, and keeps it from now on."""
        if ref.kind != "expert" or not self.alternates.named:
            return False
        try:
            self.objects.read(shard_name(ref.sha256), max_bytes=ref.bytes)
        except ObjectMissing:
            return self.alternates.lend(ref)
        except ObjectRefused:
            pass  # something is in its place, and whoever writes the shard will say so
        return False

    def resolve(self, record: ChannelRecord) -> Manifest:
        """Read the manifest that `record` was written for, and no other of the same number. Raise
        SignatureRefused where it has to be trusted and is not."""
        manifest = self.read_manifest(record.target)
        if manifest.digest != record.target_digest:
            raise RecordInvalid(
                record_name(record.channel, record.number),
                f"it names another version {record.target} than the one that is there",
            )
        return self.keys.check_version(manifest)

    def forgotten(self) -> frozenset[str]:
        """List the digests of image shards that were forgotten."""
        return forgotten_shards(self.objects)
