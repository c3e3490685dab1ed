"""Reads a store from end to end and names every object that is not what it should be.

Needs neither torch nor numpy, changes nothing, and goes on after a bad object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_store.errors import StoreError
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
from model_store.manifest import Manifest, ShardRef
from model_store.objects import Entry
from model_store.shard import check_shard, expected_tensors, image_bounds, read_layout
from model_store.spec import Shape

if TYPE_CHECKING:
    from model_store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """`problems` and `unused` name one object each; what is unused harms nobody."""

    problems: tuple[str, ...]
    unused: tuple[str, ...]
    versions: int
    shards: int
    records: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_store(store: Store, version: int | None = None) -> VerifyReport:
    """The whole store, or one version with the manifests of its ancestors and its shards."""
    walk = _Walk(store)
    if version is None:
        walk.everything()
    else:
        walk.one_version(store.manifest(version))
    return walk.report()


class _Walk:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.problems: dict[str, None] = {}
        self.unused: list[str] = []
        self.manifests: dict[int, Manifest] = {}
        self.checked: set[tuple[ShardRef, tuple[tuple[str, Shape], ...] | None]] = set()
        self.image_counts: dict[str, int] = {}
        self.shard_bytes: dict[str, int] = {}
        self.records = 0

    def everything(self) -> None:
        with self._noting():
            self.store.read_id()
        for version in self.store.versions():
            with self._noting():
                self.manifests[version] = self.store.manifest(version)
        for manifest in self.manifests.values():
            self._check_parent(manifest)
            self._check_shards(manifest)
        for channel in self.store.channels():
            self._check_channel(channel)
        self._find_unused()

    def one_version(self, manifest: Manifest) -> None:
        self._check_shards(manifest)
        self.manifests[manifest.version] = manifest
        while manifest.parent is not None:
            with self._noting():
                self.manifests[manifest.parent] = self.store.manifest(manifest.parent)
            self._check_parent(manifest)
            if manifest.parent not in self.manifests:
                return
            manifest = self.manifests[manifest.parent]

    def report(self) -> VerifyReport:
        return VerifyReport(
            problems=tuple(self.problems),
            unused=tuple(self.unused),
            versions=len(self.manifests),
            shards=len(self.shard_bytes),
            records=self.records,
            bytes=sum(self.shard_bytes.values()),
        )

    def _check_parent(self, manifest: Manifest) -> None:
        if manifest.parent is None:
            return
        parent = self.manifests.get(manifest.parent)
        name = version_name(manifest.version)
        if parent is None:
            self._note(f"{name} has parent {manifest.parent}, which is not there or not readable")
        elif parent.digest != manifest.parent_digest:
            self._note(f"{name} was made from another version {manifest.parent} than this one")

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
        """Once for each use that differs: a later version mostly adds nothing to read."""
        expected = expected_tensors(manifest, ref)
        use = (ref, None if expected is None else tuple(expected.items()))
        if use in self.checked:
            return
        self.checked.add(use)
        data = self.store.read_shard(ref)
        check_shard(ref, data, expected=expected)
        if ref in manifest.image_shards:
            self.image_counts[ref.sha256] = len(image_bounds(data, read_layout(data)))
        self.shard_bytes[ref.sha256] = len(data)

    def _check_channel(self, channel: str) -> None:
        numbers = self.store.record_numbers(channel)
        for number in range(1, max(numbers) + 1):
            with self._noting():
                record = self.store.record(channel, number)
                self.records += 1
                target = self.manifests.get(record.target)
                name = record_name(channel, number)
                if target is None:
                    self._note(f"{name} names version {record.target}, which cannot be read")
                elif target.digest != record.target_digest:
                    self._note(f"{name} was written for another version {record.target}")

    def _find_unused(self) -> None:
        used = {shard_name(ref.sha256) for one in self.manifests.values() for ref in one.shards}
        for entry in self._listed(SHARDS):
            if entry.name not in used:
                self.unused.append(entry.name)
                self._check_name(entry)
        for entry in self._listed(VERSIONS):
            if version_of(entry.name) is None:
                self.unused.append(entry.name)
        for entry in self._listed(CHANNELS):
            if record_of(entry.name) is None:
                self.unused.append(entry.name)

    def _check_name(self, entry: Entry) -> None:
        """A wrong shard that nothing uses yet would stop the publish that needs that name."""
        sha256 = shard_of(entry.name)
        if sha256 is not None:
            with self._noting():
                # The kind is of no account: only size and digest are looked at.
                self.store.read_shard(ShardRef(kind="expert", sha256=sha256, bytes=entry.bytes))

    def _listed(self, folder: str) -> list[Entry]:
        return sorted(self.store.objects.list(folder), key=lambda entry: entry.name)

    def _note(self, problem: str) -> None:
        self.problems[problem] = None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Whatever goes wrong inside is one more problem, and the walk goes on."""
        try:
            yield
        except StoreError as error:
            self._note(str(error))
