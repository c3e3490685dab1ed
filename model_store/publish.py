"""How a version becomes visible: shards first, manifest last, each by create-if-absent.

Before the manifest exists nothing of the version can be seen, and afterwards everything can.
Whatever stops a publish leaves at most shards that no version names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from model_store.errors import OutcomeUnknown, RecordInvalid, WriteFailed
from model_store.layout import shard_name, version_name
from model_store.manifest import MAX_VERSION, Draft, Manifest, ShardRef, decode, encode
from model_store.shard import check_digest, check_shard, expected_tensors

if TYPE_CHECKING:
    from model_store.store import Store

MAX_CONFLICTS = 1000  # each one means that somebody else got on


def publish_draft(store: Store, draft: Draft, *, shards: Mapping[str, bytes]) -> Manifest:
    _check_shards(store, draft, shards=shards)
    try:
        for ref in dict.fromkeys(draft.shards):
            if ref.sha256 in shards:
                _write_shard(store, ref, data=shards[ref.sha256])
        return _write_manifest(store, draft)
    except OutcomeUnknown:
        raise
    except WriteFailed as error:
        raise WriteFailed(f"{error}; no version was published") from error


def _check_shards(store: Store, draft: Draft, *, shards: Mapping[str, bytes]) -> None:
    """Every shard is given and right, or vouched for by the parent, or in the store and right."""
    inherited = _inherited(store, draft)
    for ref in dict.fromkeys(draft.shards):
        if ref.sha256 in shards:
            data = shards[ref.sha256]
            check_digest(ref, data)
            check_shard(ref, data, expected=expected_tensors(draft, ref))
        elif ref not in inherited:
            store.read_shard(ref)


def _inherited(store: Store, draft: Draft) -> frozenset[ShardRef]:
    """What the parent has: to read it again would cost what is there, not what is new."""
    if draft.parent is None:
        return frozenset()
    parent = store.manifest(draft.parent)
    if parent.digest != draft.parent_digest:
        raise RecordInvalid(
            "the draft", f"the digest of its parent is not that of version {draft.parent}"
        )
    return frozenset(parent.shards)


def _write_shard(store: Store, ref: ShardRef, *, data: bytes) -> None:
    if not store.objects.create(shard_name(ref.sha256), data):
        store.read_shard(ref)  # it was there before: re-hashed, not trusted


def _write_manifest(store: Store, draft: Draft) -> Manifest:
    for _ in range(MAX_CONFLICTS):
        version = (store.newest() or 0) + 1
        if version > MAX_VERSION:
            break
        name = version_name(version)
        sealed = encode(draft, version=version)
        manifest = decode(name, sealed, version=version)  # what no reader takes is not written
        if store.objects.create(name, sealed):
            return manifest
    raise WriteFailed("no free version number could be taken")
