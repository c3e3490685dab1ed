"""Define tombstones, which stand for deleted versions and for forgotten images and statistics.

The tombstone of a version keeps number and digest, so that the chain of versions still holds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from model_store.backends.base import Objects, parsed
from model_store.errors import RecordInvalid
from model_store.layout import (
    DELETED,
    FORGOTTEN,
    deleted_name,
    deleted_of,
    forgotten_name,
    forgotten_of,
)
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.sealing import (
    FORMAT,
    Record,
    Sha256,
    Text,
    Timestamp,
    Transaction,
    Version,
    find_record,
)

FORGETTABLE = frozenset({"memory", "held-out", "statistics"})
"""The kinds of shards that hold images of a class, or follow from images of one class alone."""


class DeletedVersion(Record):
    """`deleted/<number>.json`: the digest and the parent of the version that had that number."""

    format: Literal[1] = FORMAT
    version: Version
    manifest_digest: Sha256
    parent: Version | None
    parent_digest: Sha256 | None
    actor: Text
    reason: Text
    time: Timestamp
    transaction: Transaction


class ForgottenShard(Record):
    """`forgotten/<sha256>.json`: images or statistics of a class that must not be kept any more."""

    format: Literal[1] = FORMAT
    sha256: Sha256
    class_name: str = Field(alias="class")
    actor: Text
    reason: Text
    time: Timestamp
    transaction: Transaction


def deleted_versions(objects: Objects) -> list[int]:
    """List the numbers of all versions that have a tombstone, ascending."""
    return sorted(parsed(objects.list_names(DELETED), deleted_of))


def read_deleted(objects: Objects, version: int) -> DeletedVersion | None:
    """Read the tombstone of a version; None where there is none."""
    name = deleted_name(version)
    tombstone = find_record(objects, name, DeletedVersion)
    if tombstone is not None and tombstone.version != version:
        raise RecordInvalid(name, f"it says it stands for version {tombstone.version}")
    return tombstone


def has_deleted_number(manifest: Manifest, tombstone: DeletedVersion | None) -> bool:
    """Return whether a manifest has the number of another version that was deleted before. Its
    writer looks for the tombstone before it tells anybody, so nobody knows of the manifest."""
    return tombstone is not None and tombstone.manifest_digest != manifest.digest


def forgotten_shards(objects: Objects) -> frozenset[str]:
    """List the digests of all shards that have a tombstone."""
    return frozenset(parsed(objects.list_names(FORGOTTEN), forgotten_of))


def read_forgotten(objects: Objects, sha256: str) -> ForgottenShard | None:
    """Read the tombstone of a shard; None where there is none."""
    name = forgotten_name(sha256)
    tombstone = find_record(objects, name, ForgottenShard)
    if tombstone is not None and tombstone.sha256 != sha256:
        raise RecordInvalid(name, f"it says it stands for shard {tombstone.sha256}")
    return tombstone


def may_be_missing(ref: ShardRef, forgotten: frozenset[str]) -> bool:
    """Return whether a tombstone excuses a missing shard. Weights cannot be forgotten."""
    return ref.kind in FORGETTABLE and ref.sha256 in forgotten
