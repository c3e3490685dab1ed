"""Read a channel, and move it: append a record that names the next target.

A record is created if its number is free. A writer that finds it taken looks at the channel again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from model_store.backends.base import (
    MAX_CONFLICTS,
    Entry,
    ObjectMissing,
    Objects,
    keyed,
    parsed,
)
from model_store.errors import (
    ChannelBroken,
    ChannelMoved,
    ChannelNotFound,
    RecordInvalid,
    SignatureRefused,
    StoreUnsupported,
    VersionDeleted,
    WriteFailed,
)
from model_store.layout import CHANNELS, record_name, record_of
from model_store.records.channel import (
    ChannelRecord,
    Mode,
    check_channel_name,
    decode_record,
    resume_target,
    rollback_target,
)
from model_store.records.manifest import Manifest
from model_store.records.sealing import (
    MAX_VERSION,
    create_record,
    make_record,
    read_sealed,
    timestamp,
)
from model_store.records.tombstone import deleted_versions
from model_store.store.reserve import using_reserve
from model_store.store.versions import VersionReader

Check = Callable[[Manifest], object]
"""Called with the version that a record will name, before it is written. Raises to prevent it."""


def unchecked(manifest: Manifest) -> None:
    """Let any version be named."""


class Channel:
    """The records of one channel, each of which names a version to serve."""

    def __init__(self, versions: VersionReader, name: str) -> None:
        self._versions = versions
        self.name = name

    def name_of(self, number: int) -> str:
        """Return the name of the object that has a record."""
        return record_name(self.name, number)

    def record(self, number: int) -> ChannelRecord:
        """Read one record of a channel. Raise SignatureRefused where it has to be trusted and is
        not."""
        name = self.name_of(number)
        try:
            sealed = read_sealed(self._versions.objects, name)
        except ObjectMissing as error:
            raise RecordInvalid(name, "it is not there") from error
        record = decode_record(name, sealed, channel=self.name, number=number)
        return self._versions.keys.check(record, name=name)

    def has_record(self, number: int) -> bool:
        """Return whether there is something under the name of a record, with one request."""
        try:
            read_sealed(self._versions.objects, self.name_of(number))
        except ObjectMissing:
            return False
        except RecordInvalid:  # what is there cannot be read as a record, and a look will say so
            pass
        return True

    def head(self, *, since: int = 1) -> ChannelRecord | None:
        """Read the newest record of a channel, with one listing and one read. A caller who has seen
        record `since` lists only later ones: a bucket lists 1,000 names with a request."""
        numbers = sorted(self.record_entries(since=since)) if since > 1 else []
        if not numbers:
            since, numbers = 1, self.record_numbers()
        if not numbers:
            return None
        try:
            return self.record(numbers[-1])
        except (RecordInvalid, StoreUnsupported) as error:
            if numbers[-1] == since + len(numbers) - 1:
                raise
            reason = f"records before it are missing, and it is not a record itself ({error})"
            name = self.name_of(numbers[-1])
            raise ChannelBroken(name, reason, channel=self.name) from error

    def history(self) -> list[ChannelRecord]:
        """Read all records of a channel, oldest first. Records that have to be trusted and are not
        are skipped: untrusted writers must not decide where the channel goes next."""
        records: list[ChannelRecord] = []
        for number in self.record_numbers():
            with suppress(SignatureRefused):
                records.append(self.record(number))
        return records

    def record_numbers(self) -> list[int]:
        """List the numbers of a channel's records, ascending."""
        names = self._versions.objects.list_names(f"{CHANNELS}/{check_channel_name(self.name)}")
        return sorted(number for _, number in parsed(names, record_of))

    def record_entries(self, *, since: int) -> dict[int, Entry]:
        """List a channel's records from a number on, without reading them."""
        folder = f"{CHANNELS}/{check_channel_name(self.name)}"
        entries = self._versions.objects.list(folder, after=self.name_of(since - 1))
        return {number: entry for (_, number), entry in keyed(entries, record_of).items()}

    def promote(
        self,
        version: int,
        *,
        actor: str,
        reason: str,
        after: int | None = None,
        check: Check = unchecked,
    ) -> ChannelRecord:
        return self._move(
            lambda: version,
            mode="follow",
            actor=actor,
            reason=reason,
            after=after,
            check=check,
        )

    def promote_or_explain(
        self,
        manifest: Manifest,
        *,
        head: ChannelRecord | None,
        actor: str,
        reason: str,
    ) -> str | None:
        """Promote a version unless its gate, a pin or a later move of the channel is against it.

        `head` is the channel's record from before the work on the version began. Return None, or
        the reason against the promotion and the next step.
        """
        number, gate = manifest.version, manifest.metrics.gate
        by_hand = f"`dne-store promote {number} --channel {self.name}` would promote it"
        if gate is not None and gate.reasons and not gate.forced:
            overruled = by_hand
            if self._versions.keys.signer is not None:
                overruled = (
                    "it is not signed, and --force would learn it again, sign and promote it"
                )
            return f"the gate refused it: {'; '.join(gate.reasons)}; {overruled}"
        if head is not None and head.mode == "pin":
            return f"channel {self.name} is pinned to version {head.target}; {by_hand}"
        after = head.number if head else 0
        try:
            self.promote(number, actor=actor, reason=reason, after=after)
        except ChannelMoved:
            return (
                f"channel {self.name} has moved meanwhile, so version {number} is a branch; "
                f"{by_hand}, and running the same command again starts from the new head"
            )
        return None

    def rollback(
        self,
        *,
        to: int | None,
        actor: str,
        reason: str,
        after: int | None = None,
        check: Check = unchecked,
    ) -> ChannelRecord:
        self._check_names_something()
        return self._move(
            # With `to` a damaged history does not stand in the way.
            lambda: self._target_before() if to is None else to,
            mode="pin",
            actor=actor,
            reason=reason,
            after=after,
            check=check,
        )

    def resume(self, *, actor: str, reason: str, check: Check = unchecked) -> ChannelRecord:
        self._check_names_something()
        return self._move(
            lambda: resume_target(self.history()),
            mode="follow",
            actor=actor,
            reason=reason,
            check=check,
        )

    def _target_before(self) -> int:
        deleted = deleted_versions(self._versions.objects)
        return rollback_target(self.history(), deleted=deleted)

    def _check_names_something(self) -> None:
        if not self.record_numbers():
            raise ChannelNotFound(f"channel {self.name} names no version yet; promote one first")

    def _newest(self) -> int:
        """Find the number that the next record follows; 0 where there is none. Raise ChannelBroken
        where none can follow. Records without a gap are not read: a damaged record must not keep a
        channel from moving on."""
        numbers = self.record_numbers()
        newest = max(numbers, default=0)
        if newest != len(numbers):
            self.head()
        if newest >= MAX_VERSION:
            name = self.name_of(newest)
            raise ChannelBroken(name, "no record can follow it", channel=self.name)
        return newest

    def _move(
        self,
        target: Callable[[], int],
        *,
        mode: Mode,
        actor: str,
        reason: str,
        check: Check,
        after: int | None = None,
    ) -> ChannelRecord:
        self._versions.keys.check_can_write()
        for _ in range(MAX_CONFLICTS):
            # Listed before the target is chosen: a record that comes in between is a conflict,
            # and the target is chosen again.
            newest = self._newest()
            if after not in (None, newest):
                done = "promoted" if mode == "follow" else "returned to"
                raise ChannelMoved(
                    f"channel {self.name} was moved by someone else, so version {target()} was not "
                    f"{done}"
                )
            named = self._versions.keys.check_version(self._versions.manifest(target()))
            check(named)
            record = self._append(newest + 1, named=named, mode=mode, actor=actor, reason=reason)
            if record is not None:
                return record
        raise WriteFailed(
            f"no free record number could be taken in channel {self.name}: "
            f"{self.name_of(newest + 1)} is in the way, or others move it all the time; "
            "`dne-store verify` tells"
        )

    def _append(
        self, number: int, *, named: Manifest, mode: Mode, actor: str, reason: str
    ) -> ChannelRecord | None:
        """Create a record; return None where its number is taken."""
        record = make_record(
            ChannelRecord,
            channel=self.name,
            number=number,
            target=named.version,
            target_digest=named.digest,
            mode=mode,
            actor=actor,
            reason=reason,
        )
        record = self._versions.keys.signed(record)
        if not self._create(record):
            return None
        if self._versions.is_deleted(named.version):
            self._retreat(record)
        return record

    def _create(self, record: ChannelRecord) -> bool:
        """Create a record, from the reserve on a full disk: a rollback must not wait for room."""
        with using_reserve(self._versions.objects, self._versions.alternates.backends) as objects:
            return create_record(objects, self.name_of(record.number), record)

    def _retreat(self, record: ChannelRecord) -> NoReturn:
        """Name the version before again: the target was deleted while the record was written.

        A deletion looks for records after it wrote its tombstone, so one of the two sees the other.
        """
        if record.number > 1:
            ours = self.record(record.number - 1).model_copy(
                update={
                    "number": record.number + 1,
                    "actor": record.actor,
                    "reason": f"version {record.target} was deleted meanwhile",
                    "time": timestamp(),
                    "transaction": uuid.uuid4().hex,
                    "signature": None,
                }
            )
            # A taken number means that another one has moved on, which is as good.
            self._create(self._versions.keys.signed(ours))
        raise VersionDeleted(record.target)


def newest_records(objects: Objects) -> dict[str, int]:
    """Map each channel to the number of its newest record, from one listing."""
    return dict(sorted(parsed(objects.list_names(CHANNELS), record_of)))
