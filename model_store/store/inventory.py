"""List all shards and read all manifests of a store, for housekeeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_store.backends.base import Entry, keyed
from model_store.errors import StoreError, VersionDeleted
from model_store.layout import SHARDS, shard_of
from model_store.records.manifest import Manifest
from model_store.records.tombstone import deleted_versions, has_deleted_number, read_deleted

if TYPE_CHECKING:
    from model_store.store.store import Store


def list_shards(store: Store) -> dict[str, Entry]:
    """List all shards that are there, by SHA-256."""
    return keyed(store.objects.list(SHARDS), shard_of)


def read_all_manifests(store: Store) -> list[Manifest]:
    """Read the manifests of all versions. Raise StoreError where one is lost or cannot be read:
    nobody can tell then which shards are needed."""
    try:
        versions = set(store.versions())
        deleted = set(deleted_versions(store.objects))
        heads = [record.target for name in store.channels() if (record := store.head(name))]
        return [
            manifest
            for number in range(1, max((*versions, *deleted, *heads), default=0) + 1)
            # A number in neither listing came in between, or it is lost: reading it tells.
            if number in versions or number not in deleted
            if (manifest := unless_deleted(store, number, deleted=deleted)) is not None
        ]
    except StoreError as error:
        raise StoreError(
            f"the store is damaged, so it is not known which shards are needed: {error}"
        ) from error


def unless_deleted(store: Store, version: int, *, deleted: set[int]) -> Manifest | None:
    """Read the manifest of a version; None where that version was deleted."""
    try:
        manifest = store.manifest(version)
    except VersionDeleted:
        return None
    tombstone = read_deleted(store.objects, version) if version in deleted else None
    return None if has_deleted_number(manifest, tombstone) else manifest
