"""Delete a version. A tombstone keeps its number and its digest, so the chain of versions holds.

Its shards are left to `gc`, which knows the versions that share them.
"""

from __future__ import annotations

from model_store.errors import VersionNeeded
from model_store.layout import advice_name, deleted_name, version_name
from model_store.records.gc_marks import clock_s
from model_store.records.manifest import Manifest
from model_store.records.sealing import create_record, refusing_bad_fields, timestamp
from model_store.records.tombstone import DeletedVersion, read_deleted, tombstone_of
from model_store.store.reservations import standing
from model_store.store.store import Store


def delete_version(store: Store, version: int, *, actor: str, reason: str) -> DeletedVersion:
    """Delete a version. Raise VersionNeeded where a channel names it or a run builds on it."""
    with store.using_reserve() as reserved:
        return _delete(reserved, version, actor=actor, reason=reason)


def check_deletable(store: Store, version: int) -> Manifest:
    """Read a version that could be deleted now. Raise VersionNeeded as `delete_version` does."""
    manifest = store.manifest(version)
    _check_unneeded(store, version)
    return manifest


def _delete(store: Store, version: int, *, actor: str, reason: str) -> DeletedVersion:
    manifest = check_deletable(store, version)
    with refusing_bad_fields():
        tombstone = tombstone_of(manifest, actor=actor, reason=reason, time=timestamp())
    name = deleted_name(version)
    if not create_record(store.objects, name, tombstone):
        # Another one began the deletion and did not end it. Go on with its tombstone.
        tombstone = read_deleted(store.objects, version) or tombstone
    try:
        # Once more, after the tombstone: a move looks for a tombstone after it wrote its record,
        # so one of the two sees the other.
        _check_unneeded(store, version)
    except VersionNeeded:
        store.objects.delete(name)
        raise
    store.objects.delete(version_name(version))
    store.objects.delete(advice_name(version))
    # Another deletion may have given up just now, and deleted the tombstone.
    create_record(store.objects, name, tombstone)
    return tombstone


def _check_unneeded(store: Store, version: int) -> None:
    for channel in store.channels():
        head = store.head(channel)
        if head is not None and head.target == version:
            raise VersionNeeded(
                f"version {version} is what channel {channel} names; "
                "move the channel first, then delete it"
            )
    for run in standing(store.objects, now_s=clock_s(store.objects)):
        if run.record is not None and run.record.parent == version:
            raise VersionNeeded(
                f"version {version} is what training run {run.transaction} builds on; "
                "wait until it has ended"
            )
