"""Where versions are kept. Knows the format and the protocol; the bytes go through `objects`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from model_store.channel import (
    ChannelRecord,
    Mode,
    check_channel_name,
    decode_record,
    encode_record,
    resume_target,
    rollback_target,
)
from model_store.errors import (
    ChannelMoved,
    ChannelNotFound,
    RecordInvalid,
    ShardCorrupt,
    ShardMissing,
    StoreNotFound,
    StoreUnsupported,
    VersionNotFound,
    WriteFailed,
    WrongUsage,
)
from model_store.layout import (
    CHANNELS,
    STORE,
    VERSIONS,
    record_name,
    record_of,
    shard_name,
    version_name,
    version_of,
)
from model_store.manifest import (
    MAX_VERSION,
    Draft,
    Manifest,
    Record,
    ShardRef,
    decode,
    first_reason,
)
from model_store.objects import ObjectMissing, ObjectRefused, Objects, objects_at
from model_store.publish import MAX_CONFLICTS, publish_draft
from model_store.record import FORMAT, MAX_RECORD_BYTES, seal, unseal
from model_store.shard import check_digest
from model_store.verify import VerifyReport, verify_store

MAX_SHARD_BYTES = 1 << 34  # twice the largest network that a spec allows, in float32


class StoreRecord(Record):
    """`store.json`: that this is a store, of which format, and which one."""

    format: Literal[1] = FORMAT
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Store:
    """Versions, shards and channels in one place. Nothing that was written is ever changed."""

    def __init__(self, objects: Objects, *, location: str) -> None:
        self.objects = objects
        self.location = location
        self.id = self.read_id()

    @classmethod
    def open(cls, location: str, *, objects: Objects | None = None) -> Store:
        """The store at `location`; StoreNotFound when there is none. Writes nothing."""
        return cls(objects or objects_at(location), location=location)

    @classmethod
    def create(cls, location: str, *, objects: Objects | None = None) -> Store:
        """The store at `location`, which is made when there is none."""
        objects = objects or objects_at(location)
        try:
            return cls(objects, location=location)
        except StoreNotFound:
            if objects.list(VERSIONS):
                raise RecordInvalid(STORE, "it is missing, although there are versions") from None
        _probe(objects)
        fresh = StoreRecord(id=uuid.uuid4().hex)
        objects.create(STORE, seal(fresh.model_dump(mode="json")))  # or somebody else just did
        return cls(objects, location=location)

    def read_id(self) -> str:
        try:
            body = unseal(STORE, self._read_record(STORE))
        except ObjectMissing as error:
            raise StoreNotFound(f"there is no store at {self.location}") from error
        del body["digest"]
        try:
            return StoreRecord.model_validate(body).id
        except ValidationError as error:
            raise RecordInvalid(STORE, first_reason(error)) from error

    # Versions and shards

    def versions(self) -> list[int]:
        """The numbers of all versions, ascending."""
        numbers = (version_of(entry.name) for entry in self.objects.list(VERSIONS))
        return sorted(number for number in numbers if number is not None)

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def manifest(self, version: int) -> Manifest:
        name = version_name(version)
        try:
            if not 1 <= version <= MAX_VERSION:
                raise ObjectMissing(name)
            return decode(name, self._read_record(name), version=version)
        except ObjectMissing as error:
            raise VersionNotFound(version, newest=self.newest()) from error

    def read_shard(self, ref: ShardRef) -> bytes:
        """The bytes of a shard: its size and SHA-256 are those of `ref`. Parse these very bytes."""
        if ref.bytes > MAX_SHARD_BYTES:
            raise ShardCorrupt(ref.sha256, f"it claims more than {MAX_SHARD_BYTES} bytes")
        try:
            data = self.objects.read(shard_name(ref.sha256), max_bytes=ref.bytes)
        except ObjectMissing as error:
            raise ShardMissing(ref.sha256) from error
        except ObjectRefused as error:
            raise ShardCorrupt(ref.sha256, error.reason) from error
        check_digest(ref, data)
        return data

    def publish(self, draft: Draft, *, shards: Mapping[str, bytes]) -> Manifest:
        """A new version, visible all at once or not at all.

        `shards` holds, by SHA-256, what the parent does not have. The version is in no channel
        yet: that is what `promote` is for.
        """
        return publish_draft(self, draft, shards=shards)

    # Channels

    def channels(self) -> list[str]:
        """The names of all channels that have a record, in alphabetical order."""
        found = (record_of(entry.name) for entry in self.objects.list(CHANNELS))
        return sorted({key[0] for key in found if key is not None})

    def record(self, channel: str, number: int) -> ChannelRecord:
        name = record_name(channel, number)
        try:
            sealed = self._read_record(name)
        except ObjectMissing as error:
            raise RecordInvalid(name, "it is not there") from error
        return decode_record(name, sealed, channel=channel, number=number)

    def head(self, channel: str) -> ChannelRecord | None:
        """The newest record: what is served. One listing and one read, however long the history."""
        number = max(self.record_numbers(channel), default=None)
        return None if number is None else self.record(channel, number)

    def resolve(self, record: ChannelRecord) -> Manifest:
        """The manifest that `record` was written for, and no other of the same number."""
        manifest = self.manifest(record.target)
        if manifest.digest != record.target_digest:
            raise RecordInvalid(
                record_name(record.channel, record.number),
                f"it names another version {record.target} than the one that is there",
            )
        return manifest

    def history(self, channel: str) -> list[ChannelRecord]:
        """All records of a channel, oldest first."""
        return [self.record(channel, number) for number in self.record_numbers(channel)]

    def record_numbers(self, channel: str) -> list[int]:
        entries = self.objects.list(f"{CHANNELS}/{check_channel_name(channel)}")
        return sorted(key[1] for key in map(record_of, (e.name for e in entries)) if key)

    def promote(
        self, version: int, *, channel: str, actor: str, reason: str, after: int | None = None
    ) -> ChannelRecord:
        """The channel names `version` and follows on from it.

        With `after` only if the channel's newest record has that number (0: it has none), and
        ChannelMoved otherwise; without it, whatever the channel names at the moment.
        """
        if after is None:
            return self._move(channel, lambda: version, mode="follow", actor=actor, reason=reason)
        newest = max(self.record_numbers(channel), default=0)
        if newest == after:
            record = self._append(
                channel, after + 1, target=version, mode="follow", actor=actor, reason=reason
            )
            if record is not None:
                return record
        raise ChannelMoved(
            f"channel {channel} was moved by someone else, so version {version} was not promoted"
        )

    def rollback(self, *, channel: str, to: int | None, actor: str, reason: str) -> ChannelRecord:
        """The channel names `to`, or the version before the current one, until someone moves on."""
        self._check_names_something(channel)
        return self._move(
            channel,
            # With `to` a damaged history does not stand in the way.
            lambda: rollback_target(self.history(channel)) if to is None else to,
            mode="pin",
            actor=actor,
            reason=reason,
        )

    def resume(self, *, channel: str, actor: str, reason: str) -> ChannelRecord:
        """The channel names the version again that it followed before it was rolled back."""
        self._check_names_something(channel)
        return self._move(
            channel,
            lambda: resume_target(self.history(channel)),
            mode="follow",
            actor=actor,
            reason=reason,
        )

    def verify(self, version: int | None = None) -> VerifyReport:
        """Reads and judges everything, or what one version stands on."""
        return verify_store(self, version)

    def _check_names_something(self, channel: str) -> None:
        if not self.record_numbers(channel):
            raise ChannelNotFound(f"channel {channel} names no version yet; promote one first")

    def _move(
        self, channel: str, target: Callable[[], int], *, mode: Mode, actor: str, reason: str
    ) -> ChannelRecord:
        for _ in range(MAX_CONFLICTS):
            # Listed before the target is chosen: a record that comes in between is a conflict,
            # and the choice is made again.
            number = max(self.record_numbers(channel), default=0) + 1
            record = self._append(
                channel, number, target=target(), mode=mode, actor=actor, reason=reason
            )
            if record is not None:
                return record
        raise WriteFailed(f"no free record number could be taken in channel {channel}")

    def _append(
        self, channel: str, number: int, *, target: int, mode: Mode, actor: str, reason: str
    ) -> ChannelRecord | None:
        """The record, or None when that number is taken."""
        try:
            record = ChannelRecord(
                channel=channel,
                number=number,
                target=target,
                target_digest=self.manifest(target).digest,
                mode=mode,
                actor=actor,
                reason=reason,
                time=timestamp(),
            )
        except ValidationError as error:
            raise WrongUsage(f"that cannot be recorded: {first_reason(error)}") from error
        made = self.objects.create(record_name(channel, number), encode_record(record))
        return record if made else None

    def _read_record(self, name: str) -> bytes:
        try:
            return self.objects.read(name, max_bytes=MAX_RECORD_BYTES)
        except ObjectRefused as error:
            raise RecordInvalid(name, error.reason) from error


def timestamp() -> str:
    """Now, as manifests and channel records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _probe(objects: Objects) -> None:
    """Shows that the backend honours create-if-absent: without it versions could be overwritten."""
    name = f"probe-{uuid.uuid4().hex}"
    first, second = b"first", b"second"
    try:
        made = objects.create(name, first)
        remade = objects.create(name, second)
        kept = objects.read(name, max_bytes=len(second)) == first
    finally:
        objects.delete(name)
    if not made or remade or not kept:
        raise StoreUnsupported("the backend overwrites objects, so it cannot hold a store")
