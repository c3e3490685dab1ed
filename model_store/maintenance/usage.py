"""Count the bytes of each version and of everything that could go, from manifests and listings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from model_store.records.gc_marks import list_condemned
from model_store.records.manifest import Manifest, ShardRef, total_bytes
from model_store.records.tombstone import deleted_versions
from model_store.store.inventory import list_shards, read_all_manifests
from model_store.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBytes:
    """Bytes of a version. `own`: only this version names them, so its deletion frees them. `delta`:
    its parent does not have them. `images`: memory and held-out."""

    version: int
    total: int
    images: int
    delta: int
    shared: int
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """The bytes of all shards that are there (`stored`), and the part that no version names."""

    versions: tuple[VersionBytes, ...]
    stored: int
    unnamed: int
    condemned: int
    forgotten: int
    deleted: tuple[int, ...]


def report_storage(store: Store) -> StorageReport:
    """Count the bytes of all versions."""
    manifests = read_all_manifests(store)
    there = {sha256: entry.bytes for sha256, entry in list_shards(store).items()}
    uses = Counter(sha256 for one in manifests for sha256 in {ref.sha256 for ref in one.shards})
    living = {manifest.version: manifest for manifest in manifests}
    condemned = {mark.sha256 for mark in list_condemned(store.objects).marks}
    return StorageReport(
        versions=tuple(
            _bytes_of(one, parent=_parent(store, one, living), uses=uses, there=there)
            for one in manifests
        ),
        stored=sum(there.values()),
        unnamed=sum(size for sha256, size in there.items() if sha256 not in uses),
        condemned=sum(there.get(sha256, 0) for sha256 in condemned - uses.keys()),
        forgotten=len(store.forgotten()),
        deleted=tuple(n for n in deleted_versions(store.objects) if n not in living),
    )


def _parent(store: Store, manifest: Manifest, living: dict[int, Manifest]) -> Manifest | None:
    """Find the nearest ancestor that was not deleted, mostly among the manifests at hand."""
    return living.get(manifest.parent or 0) or store.parent_of(manifest)


def _bytes_of(
    manifest: Manifest, *, parent: Manifest | None, uses: Counter[str], there: dict[str, int]
) -> VersionBytes:
    held = _there(manifest.shards, there)
    inherited = {ref.sha256 for ref in parent.shards} if parent else set()
    own = total_bytes(tuple(ref for ref in held if uses[ref.sha256] == 1))
    return VersionBytes(
        version=manifest.version,
        total=total_bytes(held),
        images=total_bytes(_there(manifest.image_shards, there)),
        delta=total_bytes(tuple(ref for ref in held if ref.sha256 not in inherited)),
        shared=total_bytes(held) - own,
        own=own,
    )


def _there(refs: tuple[ShardRef, ...], there: dict[str, int]) -> tuple[ShardRef, ...]:
    """Leave out the images that were forgotten."""
    return tuple(ref for ref in refs if ref.sha256 in there)
