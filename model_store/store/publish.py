"""Publish a version: shards first, manifest last, each by create-if-absent.

Before the manifest exists nothing of the version can be seen, and afterwards everything can. A
publish that is stopped leaves at most shards that no version names.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from model_store.backends.base import MAX_CONFLICTS, ObjectMissing, Objects
from model_store.errors import (
    OutcomeUnknown,
    RecordInvalid,
    ShardForgotten,
    StoreError,
    VersionDeleted,
    WriteFailed,
)
from model_store.layout import RUNS, deleted_name, run_name, run_of, shard_name, version_name
from model_store.records.gc_marks import rescue
from model_store.records.manifest import Draft, Manifest, ShardRef, Signs, decode, encode
from model_store.records.sealing import (
    FORMAT,
    MAX_VERSION,
    Record,
    Sha256,
    Transaction,
    Version,
    create_record,
    read_record,
)
from model_store.records.tombstone import (
    deleted_versions,
    forgotten_shards,
    has_deleted_number,
    read_deleted,
)
from model_store.store.shard import check_digest, check_shard, expected_tensors
from model_store.store.versions import VersionReader

EXPIRY_S = 7 * 24 * 3600.0
"""Older announcements, by the store's own clock, are those of runs that died."""

_MAX_ANNOUNCEMENTS = 1000  # of one run


class Announcement(Record):
    """`runs/<transaction>.json`. The random `id` tells our announcement after a lost reply."""

    format: Literal[1] = FORMAT
    transaction: Transaction
    parent: Version | None
    shards: tuple[Sha256, ...]
    id: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An announcement in a listing; `record` is None when it has expired."""

    name: str
    transaction: str
    record: Announcement | None


def announce(
    objects: Objects, transaction: str, *, parent: int | None, digests: Collection[str]
) -> None:
    """Announce a run: none of `digests` is swept until the run ends or expires."""
    record = Announcement(
        transaction=transaction,
        parent=parent,
        shards=tuple(sorted(set(digests))),
        id=uuid.uuid4().hex,
    )
    try:
        _create(objects, record)
    except OutcomeUnknown as error:
        # An announcement only protects: with or without it, nothing was published.
        raise WriteFailed(str(error)) from error
    # Announced first, looked for marks second; a sweep does it the other way round. So one of
    # the two always sees the other.
    rescue(objects, frozenset(record.shards))


def withdraw(objects: Objects, transaction: str) -> None:
    """End a run: shards that only the run needs may go."""
    for entry in objects.list(RUNS):
        if run_of(entry.name) == transaction:
            objects.delete(entry.name)


@contextmanager
def announced(
    objects: Objects, transaction: str, *, parent: int | None, digests: Collection[str]
) -> Iterator[None]:
    """Announce a publish around it, and withdraw it where the outcome is known."""
    try:
        announce(objects, transaction, parent=parent, digests=digests)
        yield
    except OutcomeUnknown:
        raise  # the manifest may be there, or still arrive
    except StoreError:
        _withdraw_quietly(objects, transaction)
        raise
    _withdraw_quietly(objects, transaction)


def standing(objects: Objects, *, now_s: float) -> list[Standing]:
    """List all announcements, with the records of those that have not expired."""
    announcements: list[Standing] = []
    for entry in objects.list(RUNS):
        transaction = run_of(entry.name)
        if transaction is None:
            continue
        record = None
        if now_s - entry.modified_s <= EXPIRY_S:
            try:
                record = _read(objects, entry.name, transaction)
            except ObjectMissing:
                continue  # withdrawn since: its manifest, if there is one, came before that
        announcements.append(Standing(name=entry.name, transaction=transaction, record=record))
    return announcements


def _create(objects: Objects, record: Announcement) -> None:
    for number in range(1, _MAX_ANNOUNCEMENTS):
        if create_record(objects, run_name(record.transaction, number), record):
            return
    raise WriteFailed(f"run {record.transaction} has announced itself too often")


def _read(objects: Objects, name: str, transaction: str) -> Announcement:
    record = read_record(objects, name, Announcement)
    if record.transaction != transaction:
        raise RecordInvalid(name, f"it says it is of run {record.transaction}")
    return record


def _withdraw_quietly(objects: Objects, transaction: str) -> None:
    # The outcome of the publish must not be hidden. An announcement that stays ends by its age.
    with suppress(StoreError):
        withdraw(objects, transaction)


def publish_draft(
    store: VersionReader, draft: Draft, *, shards: Mapping[str, bytes], signer: Signs | None = None
) -> Manifest:
    """Publish a draft under the next free number. A WriteFailed says that no version was
    published; after OutcomeUnknown there may be one."""
    for ref in dict.fromkeys(draft.shards):
        if ref.sha256 in shards:
            check_digest(ref, shards[ref.sha256])
            check_shard(ref, shards[ref.sha256], expected=expected_tensors(draft, ref))
    next_version(store)
    digests = [ref.sha256 for ref in draft.shards]
    try:
        with announced(store.objects, draft.transaction, parent=draft.parent, digests=digests):
            _check_kept(store, draft, shards=shards)
            _write_shards(store, draft, shards=shards)
            _leave_forgotten(store, draft, shards=shards)
            return _write_manifest(store, draft, signer=signer)
    except OutcomeUnknown:
        raise
    except WriteFailed as error:
        raise WriteFailed(f"{error}; no version was published") from error


def next_version(store: VersionReader) -> int:
    """Find the number of the next version. Raise WriteFailed where none is left, and name the
    object with the last number: it is hardly a version, because nobody publishes that many."""
    # A tombstone keeps its number. Listed second: a version that is deleted between the two
    # listings is in at least one of them.
    published, deleted = store.versions(), deleted_versions(store.objects)
    newest = max((0, *published, *deleted))
    if newest >= MAX_VERSION:
        name = version_name(newest) if newest in published else deleted_name(newest)
        raise WriteFailed(
            f"{name} has the last number that there is, so no version can follow it; where "
            "`dne-store verify` says that it is damaged, move it out of the store"
        )
    return newest + 1


def _check_kept(store: VersionReader, draft: Draft, *, shards: Mapping[str, bytes]) -> None:
    """Check that every shard that is not given is a shard of the parent, or in the store and
    right. Call it after the announcement: shards seen before may have been swept."""
    inherited = _inherited(store, draft)
    for ref in dict.fromkeys(draft.shards):
        if ref.sha256 not in shards and ref not in inherited:
            _reread(store, ref)


def _inherited(store: VersionReader, draft: Draft) -> frozenset[ShardRef]:
    """Return the shards of the parent, which are not read again: publishing costs the delta."""
    if draft.parent is None:
        return frozenset()
    digest: str | None = None
    shards: frozenset[ShardRef] = frozenset()
    with suppress(VersionDeleted):
        parent = store.manifest(draft.parent)
        digest, shards = parent.digest, frozenset(parent.shards)
    tombstone = read_deleted(store.objects, draft.parent)
    if tombstone is not None:
        # Deleted since the run began. Its number and digest remain; its shards are read again.
        digest, shards = tombstone.manifest_digest, frozenset()
    if digest != draft.parent_digest:
        raise RecordInvalid(
            "the draft", f"the digest of its parent is not that of version {draft.parent}"
        )
    return shards


def _write_shards(store: VersionReader, draft: Draft, *, shards: Mapping[str, bytes]) -> None:
    for ref in dict.fromkeys(draft.shards):
        if ref.sha256 in shards and not store.borrow(ref):
            try:
                if not store.objects.create(shard_name(ref.sha256), shards[ref.sha256]):
                    _reread(store, ref)  # it was there before: re-hashed, not trusted
            except OutcomeUnknown as error:
                # Without a manifest there is no version, with or without the shard.
                raise WriteFailed(str(error)) from error


def _leave_forgotten(store: VersionReader, draft: Draft, *, shards: Mapping[str, bytes]) -> None:
    """Delete shards again that were forgotten meanwhile. `forget` deletes after its tombstone,
    and this looks for tombstones after writing: one of the two comes last."""
    forgotten = forgotten_shards(store.objects)
    for ref in dict.fromkeys(entry.shard for entry in draft.kept_of_classes):
        if ref.sha256 in shards and ref.sha256 in forgotten:
            store.objects.delete(shard_name(ref.sha256))


def _reread(store: VersionReader, ref: ShardRef) -> None:
    # VersionReader may name forgotten images, which are not there on purpose.
    with suppress(ShardForgotten):
        store.read_stored_shard(ref)


def _write_manifest(store: VersionReader, draft: Draft, *, signer: Signs | None) -> Manifest:
    for _ in range(MAX_CONFLICTS):
        version = next_version(store)
        name = version_name(version)
        sealed = encode(draft, version=version, store=store.id, signer=signer_of(draft, signer))
        manifest = decode(name, sealed, version=version)  # readers must be able to read it
        if store.objects.create(name, sealed) and _keeps_its_number(store, manifest):
            return manifest
    raise WriteFailed(
        f"no free version number could be taken: {name} is in the way, or others publish all the "
        "time; `dne-store verify` tells"
    )


def signer_of(draft: Draft, signer: Signs | None) -> Signs | None:
    """Return the signer, or None for a version that the gate refused and nobody forced."""
    gate = draft.metrics.gate
    return signer if gate is None or gate.passed or gate.forced else None


def _keeps_its_number(store: VersionReader, manifest: Manifest) -> bool:
    """Return False, and delete the manifest, where its number belongs to a version that was
    published and deleted since our listing. An error from here on leaves the outcome unknown."""
    name = version_name(manifest.version)
    try:
        if not has_deleted_number(manifest, read_deleted(store.objects, manifest.version)):
            return True
        store.objects.delete(name)
    except StoreError as error:
        raise OutcomeUnknown(f"{name} was written, but may not stay: {error}") from error
    return False
