"""Read a store from end to end and name every object that is damaged or unused.

Nothing is changed, and a bad object does not end the walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from model_store.backends.base import Entry, ObjectMissing, ObjectRefused
from model_store.errors import StoreError, VersionDeleted
from model_store.layout import (
    CHANNELS,
    SHARDS,
    VERSIONS,
    record_name,
    record_of,
    shard_name,
    shard_of,
    version_name,
    version_of,
)
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.sealing import MAX_RECORD_BYTES, read_record
from model_store.records.signing import Trust, check_signature
from model_store.records.tombstone import (
    DeletedVersion,
    deleted_versions,
    forgotten_shards,
    has_deleted_number,
    may_be_missing,
    read_deleted,
    read_forgotten,
)
from model_store.spec import Shape
from model_store.store.alternates import Borrower, borrower_records
from model_store.store.channel import Channel, newest_records
from model_store.store.shard import check_shard, expected_tensors, image_bounds, read_layout
from model_store.store.versions import VersionReader


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The outcome of a walk. Unused objects harm nobody."""

    problems: tuple[str, ...]
    unused: tuple[str, ...]
    versions: int
    shards: int
    records: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_store(
    store: VersionReader, version: int | None = None, *, trust: Trust | None = None
) -> VerifyReport:
    """Check the whole store, or one version with its shards and the manifests of its ancestors.

    With `trust` every version and the newest record of every channel, or that version, must be
    signed with a trusted key.
    """
    walk = _Walk(store)
    if version is None:
        walk.everything()
    else:
        walk.one_version(store.manifest(version))
    walk.signatures(version, trust=trust)
    return walk.report()


def check_servable(store: VersionReader, manifest: Manifest) -> None:
    """Read every shard that a server needs for a version, from the store itself and not from a
    cache. Raise ShardMissing or ShardCorrupt for the first one that cannot be served."""
    for ref in dict.fromkeys(manifest.model_shards):
        data = store.read_stored_shard(ref)
        check_shard(ref, data, expected=expected_tensors(manifest, ref))


class _Walk:
    def __init__(self, store: VersionReader) -> None:
        self.store = store
        self.problems: dict[str, None] = {}
        self.unused: list[str] = []
        self.manifests: dict[int, Manifest] = {}
        self.deleted: dict[int, DeletedVersion] = {}
        self.forgotten: frozenset[str] = frozenset()
        self.checked: set[tuple[ShardRef, tuple[tuple[str, Shape], ...] | None]] = set()
        self.image_counts: dict[str, int] = {}
        self.shard_bytes: dict[str, int] = {}
        self.records = 0
        self.heads: list[ChannelRecord] = []

    def everything(self) -> None:
        with self._noting():
            self.store.read_id()
        for version in self.store.versions():
            with self._noting():
                self.manifests[version] = self.store.manifest(version)
        self._read_tombstones()
        self._find_gaps()
        for manifest in self.manifests.values():
            self._check_parent(manifest)
            self._check_shards(manifest)
        for name in newest_records(self.store.objects):
            self._check_channel(Channel(self.store, name))
        self._check_free(version_name(max((0, *self.store.versions(), *self.deleted)) + 1))
        for problem in self.store.alternates.problems():
            self._note(problem)
        for name in borrower_records(self.store.objects):
            with self._noting():
                read_record(self.store.objects, name, Borrower)
        self._find_unused()

    def one_version(self, manifest: Manifest) -> None:
        self._read_forgotten()
        self._check_shards(manifest)
        self.manifests[manifest.version] = manifest
        child: Manifest | DeletedVersion | None = manifest
        while child is not None and child.parent is not None:
            with self._noting():
                self._read_ancestor(child.parent)
            self._check_parent(child)
            child = self.manifests.get(child.parent) or self.deleted.get(child.parent)

    def _read_ancestor(self, version: int) -> None:
        try:
            self.manifests[version] = self.store.manifest(version)
        except VersionDeleted:
            tombstone = read_deleted(self.store.objects, version)
            if tombstone is not None:
                self.deleted[version] = tombstone

    def _read_tombstones(self) -> None:
        for version in deleted_versions(self.store.objects):
            with self._noting():
                tombstone = read_deleted(self.store.objects, version)
                if tombstone is not None:
                    self.deleted[version] = tombstone
        for version, manifest in tuple(self.manifests.items()):
            if has_deleted_number(manifest, self.deleted.get(version)):
                self.unused.append(version_name(version))
                del self.manifests[version]
        for tombstone in self.deleted.values():
            self._check_parent(tombstone)
        self._read_forgotten()

    def _find_gaps(self) -> None:
        """Note the versions that are lost: numbers rise by one, and tombstones keep them."""
        numbers = {*self.store.versions(), *self.deleted}
        for number in sorted(numbers):
            if number > 1 and number - 1 not in numbers:
                with self._noting():
                    self.store.manifest(number - 1)  # it may have come since

    def _read_forgotten(self) -> None:
        """Read the tombstones of images. One that cannot be trusted excuses no missing shard."""
        forgotten: set[str] = set()
        for sha256 in forgotten_shards(self.store.objects):
            with self._noting():
                if read_forgotten(self.store.objects, sha256) is not None:
                    forgotten.add(sha256)
        self.forgotten = frozenset(forgotten)

    def signatures(self, version: int | None, *, trust: Trust | None) -> None:
        """Check every signature. The signature of a version covers the shards that it inherits, and
        the head of a channel is the only record that decides what is served."""
        for manifest in self.manifests.values():
            with self._noting():
                if trust is not None and version in (None, manifest.version):
                    trust.check(manifest, store=self.store.id)
                else:
                    check_signature(manifest, name=version_name(manifest.version))
        if trust is None:
            return
        for head in self.heads:
            with self._noting():
                name = record_name(head.channel, head.number)
                trust.check_record(head, name=name, store=self.store.id)

    def report(self) -> VerifyReport:
        return VerifyReport(
            problems=tuple(self.problems),
            unused=tuple(self.unused),
            versions=len(self.manifests),
            shards=len(self.shard_bytes),
            records=self.records,
            bytes=sum(self.shard_bytes.values()),
        )

    def _check_parent(self, child: Manifest | DeletedVersion) -> None:
        if child.parent is None:
            return
        digest = self._digest_of(child.parent)
        name = version_name(child.version)
        if digest is None:
            self._note(f"{name} has parent {child.parent}, which is not there or not readable")
        elif digest != child.parent_digest:
            self._note(f"{name} was made from another version {child.parent} than this one")

    def _digest_of(self, version: int) -> str | None:
        """Return the digest of a manifest that is there, or that a tombstone stands for."""
        if version in self.manifests:
            return self.manifests[version].digest
        return self.deleted[version].manifest_digest if version in self.deleted else None

    def _check_shards(self, manifest: Manifest) -> None:
        for ref in dict.fromkeys(manifest.shards):
            try:
                self._check_shard(manifest, ref)
            except StoreError as error:
                self._note(f"{error} ({ref.kind} of version {manifest.version})")
        for images in (*manifest.memory, *manifest.held_out):
            sha256 = images.shard.sha256
            if self.image_counts.get(sha256, images.count) < images.count:
                self._note(
                    f"shard {sha256} holds fewer than the {images.count} images "
                    f"that version {manifest.version} asks for"
                )

    def _check_shard(self, manifest: Manifest, ref: ShardRef) -> None:
        """Check a shard once for each use that differs: versions share most of their shards."""
        expected = expected_tensors(manifest, ref)
        use = (ref, None if expected is None else tuple(expected.items()))
        if use in self.checked or may_be_missing(ref, self.forgotten):
            return
        self.checked.add(use)
        data = self.store.read_stored_shard(ref)
        check_shard(ref, data, expected=expected)
        if ref in manifest.image_shards:
            self.image_counts[ref.sha256] = len(image_bounds(data, read_layout(data)))
        self.shard_bytes[ref.sha256] = len(data)

    def _check_channel(self, channel: Channel) -> None:
        numbers = channel.record_numbers()
        self._find_missing_records(channel.name, numbers)
        self._check_free(channel.name_of(numbers[-1] + 1))
        for number in numbers:
            with self._noting():
                record = channel.record(number)
                self.records += 1
                if number == numbers[-1]:
                    self.heads.append(record)
                digest = self._digest_of(record.target)
                name = channel.name_of(number)
                if digest is None:
                    self._note(f"{name} names version {record.target}, which cannot be read")
                elif digest != record.target_digest:
                    self._note(f"{name} was written for another version {record.target}")
                elif number == numbers[-1] and record.target not in self.manifests:
                    self._note(f"{name} names version {record.target}, which was deleted")
                check_signature(record, name=name)

    def _find_missing_records(self, channel: str, numbers: list[int]) -> None:
        """Note each gap once, however wide: a planted record can have any number."""
        for before, number in itertools.pairwise((0, *numbers)):
            if number > before + 1:
                missing = f"{record_name(channel, before + 1)} is missing"
                if number > before + 2:
                    missing += f", and so are those up to {record_name(channel, number - 1)}"
                self._note(f"{missing}; `dne-store mend-channel --channel {channel}` tells more")

    def _check_free(self, name: str) -> None:
        """Note a folder under the next name: it stops every writer, and no listing shows it."""
        try:
            self.store.objects.read(name, max_bytes=MAX_RECORD_BYTES)
        except ObjectMissing:
            return
        except ObjectRefused as error:
            self._note(f"{name} is in the way of the next one: {error.reason}; move it away")

    def _find_unused(self) -> None:
        used = {
            shard_name(ref.sha256)
            for manifest in self.manifests.values()
            for ref in manifest.shards
        }
        kept = {
            shard_name(ref.sha256)
            for manifest in self.manifests.values()
            for ref in manifest.shards
            if not may_be_missing(ref, self.forgotten)
        }
        for entry in self._listed(SHARDS):
            if entry.name not in kept and shard_of(entry.name) in self.forgotten:
                self._note(f"{entry.name} was to be forgotten, and is there")
            elif entry.name not in used:
                self.unused.append(entry.name)
                self._check_name(entry)
        for entry in self._listed(VERSIONS):
            if version_of(entry.name) is None:
                self.unused.append(entry.name)
        for entry in self._listed(CHANNELS):
            if record_of(entry.name) is None:
                self.unused.append(entry.name)

    def _check_name(self, entry: Entry) -> None:
        """Check an unused shard: a wrong one would stop the publish that needs its name."""
        sha256 = shard_of(entry.name)
        if sha256 is not None:
            with self._noting():
                # Only size and digest are checked, so any kind will do.
                self.store.read_stored_shard(
                    ShardRef(kind="expert", sha256=sha256, bytes=entry.bytes)
                )

    def _listed(self, folder: str) -> list[Entry]:
        return sorted(self.store.objects.list(folder), key=lambda entry: entry.name)

    def _note(self, problem: str) -> None:
        self.problems[problem] = None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note a StoreError as one more problem, and let the walk go on."""
        try:
            yield
        except StoreError as error:
            self._note(str(error))
