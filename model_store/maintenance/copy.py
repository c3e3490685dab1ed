"""Copy to a store everything that another store has and it lacks.

A copy can stop anywhere and go on later. Nothing in the target is changed or removed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from model_store.errors import CopyRefused, ShardForgotten
from model_store.layout import deleted_name, forgotten_name, record_name, shard_name, version_name
from model_store.records.manifest import Manifest, ShardRef, decode
from model_store.records.sealing import read_sealed
from model_store.records.tombstone import (
    deleted_versions,
    forgotten_shards,
    may_be_missing,
    read_deleted,
)
from model_store.store.inventory import list_shards, read_all_manifests
from model_store.store.reservations import announced
from model_store.store.store import Store

Progress = Callable[[int, int], None]
"""Called with the bytes that are copied and the bytes to copy in all."""


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """The copied versions, shards, bytes and channel records. `moved_on`: channels that the target
    has moved by itself, left alone. `remembered`: shards that only the source has forgotten."""

    versions: list[int] = field(default_factory=list)
    shards: int = 0
    bytes: int = 0
    records: int = 0
    moved_on: list[str] = field(default_factory=list)
    remembered: list[str] = field(default_factory=list)


def copy_store(
    source: Store, target: Store, *, progress: Progress = lambda done, total: None
) -> CopyReport:
    """Copy tombstones of images, then each version after its shards, then the channels.

    Raise CopyRefused where the target has other versions of the same numbers: two stores that
    were filled separately do not become one.
    """
    manifests = read_all_manifests(source)
    digests = [ref.sha256 for manifest in manifests for ref in manifest.shards]
    with announced(target.objects, uuid.uuid4().hex, parent=None, digests=digests):
        return _Copy(source, target, manifests=manifests, progress=progress).run()


class _Copy:
    def __init__(
        self, source: Store, target: Store, *, manifests: list[Manifest], progress: Progress
    ) -> None:
        self.source = source
        self.target = target
        self.progress = progress
        self.report = CopyReport()
        # Listed after the announcement: housekeeping leaves alone what is found from here on.
        self.held = {manifest.version: manifest for manifest in read_all_manifests(target)}
        self.deleted = set(deleted_versions(target.objects)) - self.held.keys()
        self.wanted = {one.version: one for one in manifests if one.version not in self.deleted}
        self.forgotten = forgotten_shards(source.objects) | forgotten_shards(target.objects)
        there = list_shards(target)
        self.there = set(there)
        self.vouched = {ref.sha256 for one in self.held.values() for ref in one.shards}
        self.total = sum(
            {
                ref.sha256: ref.bytes
                for manifest in self.wanted.values()
                for ref in manifest.shards
                if ref.sha256 not in there and not may_be_missing(ref, self.forgotten)
            }.values()
        )
        self._check_same(manifests)

    def run(self) -> CopyReport:
        self.progress(0, self.total)
        self._copy_forgotten()
        for version in sorted({*self.wanted, *deleted_versions(self.source.objects)}):
            if version in self.wanted:
                self._copy_version(self.wanted[version])
            elif version not in self.held and version not in self.deleted:
                self._copy_record(deleted_name(version))
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

    def _copy_forgotten(self) -> None:
        for sha256 in sorted(forgotten_shards(self.source.objects)):
            if sha256 in self.there:
                self.report.remembered.append(sha256)
            else:
                self._copy_record(forgotten_name(sha256))

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
        name = version_name(manifest.version)
        sealed = read_sealed(self.source.objects, name)
        decode(name, sealed, version=manifest.version)
        if not self.target.objects.create(name, sealed):
            found = self.target.manifest(manifest.version)
            if found.digest != manifest.digest:
                raise CopyRefused(
                    f"version {manifest.version} was published in {self.target.location} meanwhile"
                )
        self.report.versions.append(manifest.version)

    def _copy_channel(self, channel: str) -> None:
        numbers = self.source.record_numbers(channel)
        known = self.target.record_numbers(channel)
        followed = known == numbers[: len(known)] and all(
            self.source.record(channel, number) == self.target.record(channel, number)
            for number in known
        )
        head = self.source.record(channel, numbers[-1])
        if not followed or head.target in self.deleted:
            self.report.moved_on.append(channel)
            return
        for number in numbers[len(known) :]:
            self.source.record(channel, number)  # checked before it is passed on
            if not self._copy_record(record_name(channel, number)):
                self.report.moved_on.append(channel)
                return
            self.report.records += 1

    def _copy_record(self, name: str) -> bool:
        sealed = read_sealed(self.source.objects, name)
        return self.target.objects.create(name, sealed)


def _with_tombstones(store: Store, digests: dict[int, str]) -> dict[int, str]:
    found = (read_deleted(store.objects, number) for number in deleted_versions(store.objects))
    return {**{one.version: one.manifest_digest for one in found if one}, **digests}
