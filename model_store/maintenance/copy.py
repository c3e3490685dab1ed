"""Copy everything that a store lacks from another store.

A copy can stop anywhere and go on later. Nothing in the target is changed or removed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from model_store.errors import CopyRefused, ShardForgotten, SignatureRefused
from model_store.layout import deleted_name, forgotten_name, record_name, shard_name, version_name
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, ShardRef, decode, encode, reseal
from model_store.records.sealing import create_record, read_sealed
from model_store.records.signing import NO_KEYS, Keys
from model_store.records.tombstone import (
    DeletedVersion,
    deleted_versions,
    forgotten_shards,
    may_be_missing,
    read_deleted,
)
from model_store.store.publish import announced, signer_of
from model_store.store.store import Store, list_shards, read_all_manifests


class _Renewal:
    """Records of a source, rewritten for the target. Without a key they stay as they are."""

    def __init__(self, keys: Keys, *, source: str, target: str) -> None:
        """`source` and `target` are the ids of the stores. With a trust file only records that are
        trusted in the source are signed; without one, all but versions that the gate refused."""
        self._signs = replace(keys, trust=None, store=target)
        self._trust = keys.trust
        self._source = source
        self._digests: dict[str, str] = {}
        """New digests of versions by their old ones."""

    def version(self, manifest: Manifest) -> Manifest:
        """Renew a version, whose parent was renewed before."""
        if self._signs.signer is None:
            return manifest
        parent = manifest.parent_digest
        sealed = encode(
            manifest.model_copy(update={"parent_digest": parent and self._digest(parent)}),
            version=manifest.version,
            store=self._signs.store,
            signer=signer_of(manifest, self._signs.signer) if self._is_trusted(manifest) else None,
        )
        renewed = decode(version_name(manifest.version), sealed, version=manifest.version)
        self._digests[manifest.digest] = renewed.digest
        return renewed

    def record(self, record: ChannelRecord) -> ChannelRecord:
        if self._signs.signer is None:
            return record
        changed = {"target_digest": self._digest(record.target_digest), "signature": None}
        renewed = record.model_copy(update=changed)
        return self._signs.signed(renewed) if self._is_trusted(record) else renewed

    def deleted(self, tombstone: DeletedVersion) -> DeletedVersion:
        """Let a tombstone name the new digest of its parent. Its own version is gone, so that has
        no other digest."""
        parent = tombstone.parent_digest
        return tombstone.model_copy(update={"parent_digest": parent and self._digest(parent)})

    def _digest(self, old: str) -> str:
        return self._digests.get(old, old)

    def _is_trusted(self, record: Manifest | ChannelRecord) -> bool:
        """Return whether the source's readers trust a record, or a version of form 1."""
        if self._trust is None:
            return True
        try:
            if isinstance(record, Manifest):
                self._trust.check(record, store=self._source, also_form_1=True)
            else:
                name = record_name(record.channel, record.number)
                self._trust.check_record(record, name=name, store=self._source)
        except SignatureRefused:
            return False
        return True


Progress = Callable[[int, int], None]
"""Called with the bytes that are copied and the bytes to copy in all."""


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """The copied versions, shards, bytes and channel records. `moved_on`: channels that the target
    has moved by itself, left alone. `remembered`: shards that only the source has forgotten.
    `signed`: versions that were signed for the target. `foreign`: versions with a signature for
    another store. `unsigned`: heads of channels without a signature for the target, by channel."""

    versions: list[int] = field(default_factory=list)
    shards: int = 0
    bytes: int = 0
    records: int = 0
    moved_on: list[str] = field(default_factory=list)
    remembered: list[str] = field(default_factory=list)
    signed: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    unsigned: dict[str, int] = field(default_factory=dict)


def copy_store(
    source: Store,
    target: Store,
    *,
    keys: Keys = NO_KEYS,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Copy tombstones of images, then each version after its shards, then the channels. With a key
    versions and channel records are signed again, for the target.

    Raise CopyRefused where the target has other versions of the same numbers: two stores that
    were filled separately do not become one.
    """
    renewal = _Renewal(keys, source=source.id, target=target.id)
    manifests = [renewal.version(manifest) for manifest in read_all_manifests(source)]
    digests = [ref.sha256 for manifest in manifests for ref in manifest.shards]
    with announced(target.objects, uuid.uuid4().hex, parent=None, digests=digests):
        copy = _Copy(source, target, manifests=manifests, renewal=renewal, progress=progress)
        return copy.run()


class _Copy:
    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        manifests: list[Manifest],
        renewal: _Renewal,
        progress: Progress,
    ) -> None:
        self.source = source
        self.target = target
        self.renewal = renewal
        self.progress = progress
        self.report = CopyReport()
        # Listed after the announcement: housekeeping leaves alone what is found from here on.
        self.held = {manifest.version: manifest for manifest in read_all_manifests(target)}
        self.deleted = set(deleted_versions(target.objects)) - self.held.keys()
        self.wanted = {
            manifest.version: manifest
            for manifest in manifests
            if manifest.version not in self.deleted
        }
        self.forgotten = forgotten_shards(source.objects) | forgotten_shards(target.objects)
        self.there = set(list_shards(target))
        self.vouched = {ref.sha256 for manifest in self.held.values() for ref in manifest.shards}
        borrowed = {
            ref.sha256
            for ref in {ref for manifest in self.wanted.values() for ref in manifest.experts}
            if ref.sha256 not in self.there and target.borrow(ref)
        }
        self.there |= borrowed
        self.vouched |= borrowed
        self.total = sum(
            {
                ref.sha256: ref.bytes
                for manifest in self.wanted.values()
                for ref in manifest.shards
                if ref.sha256 not in self.there and not may_be_missing(ref, self.forgotten)
            }.values()
        )
        self._check_same(manifests)

    def run(self) -> CopyReport:
        self.progress(0, self.total)
        for sha256 in sorted(forgotten_shards(self.source.objects)):
            if sha256 in self.there:
                self.report.remembered.append(sha256)
            else:
                self._copy_record(forgotten_name(sha256))
        for version in sorted({*self.wanted, *deleted_versions(self.source.objects)}):
            if version in self.wanted:
                self._copy_version(self.wanted[version])
            elif version not in self.held and version not in self.deleted:
                self._copy_tombstone(version)
        for channel in self.source.channels():
            self._copy_channel(channel)
        return self.report

    def _check_same(self, manifests: list[Manifest]) -> None:
        ours = {manifest.version: manifest.digest for manifest in manifests}
        ours = _with_tombstones(self.source, ours)
        theirs = {version: manifest.digest for version, manifest in self.held.items()}
        theirs = _with_tombstones(self.target, theirs)
        for version in sorted(ours.keys() & theirs.keys()):
            if ours[version] != theirs[version]:
                raise CopyRefused(
                    f"{self.target.location} has another version {version} than "
                    f"{self.source.location}; nothing was copied"
                )

    def _copy_version(self, manifest: Manifest) -> None:
        for ref in dict.fromkeys(manifest.shards):
            if not may_be_missing(ref, self.forgotten):
                self._copy_shard(ref)
        if manifest.version not in self.held:
            self._copy_manifest(manifest)

    def _copy_shard(self, ref: ShardRef) -> None:
        """Copy a shard, also one of a version that the target has: a copy mends the target."""
        if ref.sha256 in self.there:
            if ref.sha256 not in self.vouched:
                self.target.read_stored_shard(ref)  # left by a copy that was stopped
                self.vouched.add(ref.sha256)
            return
        try:
            data = self.source.read_stored_shard(ref)
        except ShardForgotten:
            self._copy_record(forgotten_name(ref.sha256))  # at this very moment
            return
        if not self.target.objects.create(shard_name(ref.sha256), data):
            self.target.read_stored_shard(ref)
        self.there.add(ref.sha256)
        self.vouched.add(ref.sha256)
        self.report.shards += 1
        self.report.bytes += len(data)
        self.progress(self.report.bytes, self.total)

    def _copy_manifest(self, manifest: Manifest) -> None:
        if not self.target.objects.create(version_name(manifest.version), reseal(manifest)):
            published = self.target.manifest(manifest.version)
            if published.digest != manifest.digest:
                raise CopyRefused(
                    f"version {manifest.version} was published in {self.target.location} meanwhile"
                )
        self.report.versions.append(manifest.version)
        if manifest.signature is not None:
            own = manifest.signature.store == self.target.id
            (self.report.signed if own else self.report.foreign).append(manifest.version)

    def _copy_tombstone(self, version: int) -> None:
        tombstone = read_deleted(self.source.objects, version)
        if tombstone is not None:
            renewed = self.renewal.deleted(tombstone)
            create_record(self.target.objects, deleted_name(version), renewed)

    def _copy_channel(self, channel: str) -> None:
        numbers = self.source.record_numbers(channel)
        known = self.target.record_numbers(channel)
        followed = known == numbers[: len(known)] and all(
            self._renewed(channel, number) == self.target.record(channel, number)
            for number in known
        )
        head = self._renewed(channel, numbers[-1])
        if not followed or head.target in self.deleted:
            self.report.moved_on.append(channel)
            return
        for number in numbers[len(known) :]:
            record = self._renewed(channel, number)
            if not create_record(self.target.objects, record_name(channel, number), record):
                self.report.moved_on.append(channel)
                return
            self.report.records += 1
        if head.signature is None or head.signature.store != self.target.id:
            self.report.unsigned[channel] = head.target

    def _renewed(self, channel: str, number: int) -> ChannelRecord:
        return self.renewal.record(self.source.record(channel, number))

    def _copy_record(self, name: str) -> bool:
        sealed = read_sealed(self.source.objects, name)
        return self.target.objects.create(name, sealed)


def _with_tombstones(store: Store, digests: dict[int, str]) -> dict[int, str]:
    tombstones = (read_deleted(store.objects, number) for number in deleted_versions(store.objects))
    return {**{entry.version: entry.manifest_digest for entry in tombstones if entry}, **digests}
