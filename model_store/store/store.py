"""Open and make stores at a location, read and publish versions, move channels."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_store.backends.base import Entry, Objects, keyed
from model_store.backends.location import objects_at
from model_store.errors import (
    RecordInvalid,
    StoreError,
    StoreNotFound,
    StoreUnsupported,
    VersionDeleted,
    WrongUsage,
)
from model_store.layout import SHARDS, STORE, VERSIONS, shard_of
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Draft, Manifest, Signs
from model_store.records.sealing import create_record
from model_store.records.signing import NO_KEYS, Keys
from model_store.records.tombstone import deleted_versions, has_deleted_number, read_deleted
from model_store.store.alternates import Alternate, Alternates, StoreRecord, alternate_at
from model_store.store.channel import Channel, newest_records
from model_store.store.reserve import hold_back, using_reserve
from model_store.store.versions import VersionReader

if TYPE_CHECKING:
    from model_store.records.signing import Trust
    from model_store.store.verify import VerifyReport


class Store(VersionReader):
    """VersionReader, shards and channels in one place. Nothing that was written is ever changed."""

    @classmethod
    def open(cls, location: str, *, objects: Objects | None = None, keys: Keys = NO_KEYS) -> Store:
        """Open the store at `location`. Raise StoreNotFound where there is none."""
        return cls(objects or objects_at(location), location=location, keys=keys)

    @classmethod
    def create(
        cls,
        location: str,
        *,
        objects: Objects | None = None,
        keys: Keys = NO_KEYS,
        alternates: Sequence[str] = (),
    ) -> Store:
        """Open the store at `location`, and make it where there is none. It announces itself in
        the stores at `alternates`, from which it borrows experts."""
        objects = objects or objects_at(location)
        lenders = tuple(alternate_at(location, lender) for lender in alternates)
        try:
            store = cls(objects, location=location, keys=keys)
        except StoreNotFound:
            _make_store(objects, location=location, alternates=lenders)
            store = cls(objects, location=location, keys=keys)
        else:
            if lenders:
                store.alternates.announce()
        store.check_alternates(alternates)
        hold_back(objects, store.alternates.backends)
        return store

    def check_alternates(self, locations: Sequence[str]) -> None:
        """Raise WrongUsage unless the store borrows from all of these: `store.json` stays."""
        asked = {alternate_at(self.location, lender) for lender in locations}
        if not asked <= set(self.alternates.named):
            raise WrongUsage(
                f"{self.location} is a store already, and the stores that it borrows from are "
                "named when it is made: make another one with `dne-store init --alternate`, and "
                f"`dne-store copy --store {self.location} --to` that one"
            )

    @contextmanager
    def using_reserve(self) -> Iterator[Store]:
        """Yield this store for housekeeping: its writes may use the reserve."""
        with using_reserve(self.objects, self.alternates.backends) as objects:
            yield Store(objects, location=self.location, keys=self.keys)

    def publish(
        self, draft: Draft, *, shards: Mapping[str, bytes], signer: Signs | None = None
    ) -> Manifest:
        """Publish a version, visible all at once or not at all. No channel names it yet.

        `shards` holds, by SHA-256, the shards that the parent does not have. With a `signer` the
        manifest is signed, unless the gate refused the version and nobody forced it.
        """
        from model_store.store.publish import publish_draft  # reading a store starts without it

        return publish_draft(self, draft, shards=shards, signer=signer)

    def announce(self, transaction: str, *, parent: int | None, digests: Collection[str]) -> None:
        """Keep shards from housekeeping until the version with that transaction is published, the
        announcement is withdrawn, or it expires. `publish` announces by itself."""
        from model_store.store.publish import announce

        announce(self.objects, transaction, parent=parent, digests=digests)

    def withdraw(self, transaction: str) -> None:
        """End an announced run that has no version."""
        from model_store.store.publish import withdraw

        withdraw(self.objects, transaction)

    # Channels

    def channel(self, name: str) -> Channel:
        return Channel(self, name)

    def channels(self) -> list[str]:
        """List the names of all channels that have a record, in alphabetical order."""
        return list(self.newest_records())

    def newest_records(self) -> dict[str, int]:
        """Map each channel to the number of its newest record, from one listing."""
        return newest_records(self.objects)

    def record(self, channel: str, number: int) -> ChannelRecord:
        return self.channel(channel).record(number)

    def has_record(self, channel: str, number: int) -> bool:
        return self.channel(channel).has_record(number)

    def head(self, channel: str, *, since: int = 1) -> ChannelRecord | None:
        return self.channel(channel).head(since=since)

    def history(self, channel: str) -> list[ChannelRecord]:
        return self.channel(channel).history()

    def record_numbers(self, channel: str) -> list[int]:
        return self.channel(channel).record_numbers()

    def record_entries(self, channel: str, *, since: int) -> dict[int, Entry]:
        return self.channel(channel).record_entries(since=since)

    def promote(
        self, version: int, *, channel: str, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.channel(channel).promote(version, actor=actor, reason=reason, after=after)

    def rollback(
        self, *, channel: str, to: int | None, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        return self.channel(channel).rollback(to=to, actor=actor, reason=reason, after=after)

    def resume(self, *, channel: str, actor: str, reason: str) -> ChannelRecord:
        return self.channel(channel).resume(actor=actor, reason=reason)

    def verify(self, version: int | None = None, *, trust: Trust | None = None) -> VerifyReport:
        """Check everything, or the objects that one version stands on; with `trust` also the
        signers."""
        from model_store.store.verify import verify_store

        return verify_store(self, version, trust=trust)


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


def _make_store(objects: Objects, *, location: str, alternates: tuple[Alternate, ...]) -> None:
    """Make a store, unless another process does so at this moment. It is announced before it is
    there: a power cut in between leaves a borrower that is `gone`, and can be released."""
    _refuse_versions(objects)
    _probe(objects)
    record = StoreRecord(id=uuid.uuid4().hex, alternates=alternates)
    announced = Alternates(location, record)
    announced.announce()
    if not create_record(objects, STORE, record):
        announced.withdraw()


def check_location(location: str, *, alternates: Sequence[str] = ()) -> None:
    """Show that a store can be made at `location`, where there is none, and leave nothing."""
    _refuse_versions(objects_at(location))
    for lender in alternates:
        alternate_at(location, lender)
    if "://" in location:
        _probe(objects_at(location))
        return
    # A folder that no other process uses, on the same disk: several may look at one location at a
    # time, and each removes what it has made.
    root = Path(location).absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    probed = existing / f".probe-{uuid.uuid4().hex}"
    try:
        _probe(objects_at(str(probed)))
    finally:
        for made in (probed / "tmp", probed):
            with suppress(OSError):
                made.rmdir()


def _refuse_versions(objects: Objects) -> None:
    """Refuse a location that has versions and no `store.json`: it was lost."""
    if objects.list(VERSIONS):
        raise RecordInvalid(STORE, "it is missing, although there are versions") from None


def _probe(objects: Objects) -> None:
    """Check that the backend honours create-if-absent: versions must not be overwritten."""
    name = f"probe-{uuid.uuid4().hex}"
    made = objects.create(name, b"first")
    try:
        remade = objects.create(name, b"second")
        kept = objects.read(name, max_bytes=6) == b"first"
    finally:
        objects.delete(name)
    if not made or remade or not kept:
        raise StoreUnsupported("the backend overwrites objects, so it cannot hold a store")
