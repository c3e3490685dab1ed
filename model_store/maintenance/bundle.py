"""Write what a store lacks into one file, and take it from there: a copy without a connection.

A reader knows the names of the objects of a store and looks them up: no name in a file ever becomes
a path. FORMAT.md has the bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field

from model_store.backends.base import Entry, ObjectMissing, ObjectRefused
from model_store.errors import (
    BundleRefused,
    CopyRefused,
    SignatureRefused,
    StoreNotFound,
    WriteFailed,
    WrongUsage,
)
from model_store.layout import (
    CHANNELS,
    DELETED,
    FORGOTTEN,
    STORE,
    VERSIONS,
    deleted_of,
    forgotten_of,
    record_name,
    record_of,
    shard_name,
    shard_of,
    version_of,
)
from model_store.maintenance.copy import CopyReport, Progress, copy_store
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.sealing import (
    FORMAT,
    MAX_RECORD_BYTES,
    Count,
    Record,
    Sha256,
    Transaction,
    read_sealed,
    seal_record,
    unseal_record,
)
from model_store.records.signing import NO_KEYS, Keys, Trust
from model_store.records.tombstone import deleted_versions, may_be_missing
from model_store.store.store import Store, list_shards, read_all_manifests

MAGIC = b"dne-serve bundle 1\n"
_LENGTH_BYTES = 8
_KNOWN: tuple[Callable[[str], object], ...] = (
    lambda name: name == STORE or None,
    version_of,
    record_of,
    deleted_of,
    forgotten_of,
    shard_of,
)
"""Each knows the names of one kind of objects that a bundle may have."""


class BundledObject(Record):
    """An object in a bundle, by its name in the store."""

    name: Annotated[str, Field(max_length=200)]
    bytes: Count
    sha256: Sha256


class BundleIndex(Record):
    """The objects of a bundle, in the order of their bytes. It has all records of the store `store`
    and the shards that no version up to `since` names."""

    format: Literal[1] = FORMAT
    store: Transaction
    since: Count
    objects: tuple[BundledObject, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """What was written: versions after `since`, their shards, and the size of the file."""

    since: int
    versions: list[int]
    shards: int
    bytes: int


def write_bundle(
    store: Store, path: Path, *, since: int, progress: Progress = lambda done, total: None
) -> Bundled:
    """Write a bundle for stores that have all versions up to `since`. Raise WriteFailed where the
    file cannot be written; then there is none."""
    if path.exists():
        raise WrongUsage(f"{path} is there already; a bundle is never overwritten")
    records = _records_of(store)
    manifests = read_all_manifests(store)
    if since and since not in {manifest.version for manifest in manifests}:
        store.manifest(since)  # it was deleted, or never was: the error says which
    shards = _new_shards(store, manifests, since=since)
    index = BundleIndex(
        store=store.id,
        since=since,
        objects=(
            *(
                BundledObject(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
                for name, data in records.items()
            ),
            *(
                BundledObject(name=shard_name(ref.sha256), bytes=ref.bytes, sha256=ref.sha256)
                for ref in shards
            ),
        ),
    )
    sealed = seal_record(index)
    if len(sealed) > MAX_RECORD_BYTES:
        raise CopyRefused(
            "the store has too many objects for one bundle; `dne-store copy` has no limit"
        )
    total = sum(one.bytes for one in index.objects)
    with _new_file(path) as file:
        file.write(MAGIC + len(sealed).to_bytes(_LENGTH_BYTES, "little") + sealed)
        for data in records.values():
            file.write(data)
        done = sum(map(len, records.values()))
        for ref in shards:
            progress(done, total)
            done += file.write(store.read_stored_shard(ref))
        progress(done, total)
        size = file.tell()
    newer = [manifest.version for manifest in manifests if manifest.version > since]
    return Bundled(since=since, versions=newer, shards=len(shards), bytes=size)


def _records_of(store: Store) -> dict[str, bytes]:
    """Read all sealed records that a copy takes. Channels come first: the versions that they name
    are there by then."""
    names = [
        name
        for folder, parse in (
            (CHANNELS, record_of),
            (DELETED, deleted_of),
            (FORGOTTEN, forgotten_of),
            (VERSIONS, version_of),
        )
        for name in sorted(store.objects.list_names(folder))
        if parse(name) is not None
    ]
    return {name: read_sealed(store.objects, name) for name in (STORE, *names)}


def _new_shards(store: Store, manifests: Sequence[Manifest], *, since: int) -> list[ShardRef]:
    forgotten = store.forgotten()
    known = {ref.sha256 for one in manifests if one.version <= since for ref in one.shards}
    refs = {ref.sha256: ref for one in manifests if one.version > since for ref in one.shards}
    return [
        ref
        for sha256, ref in refs.items()
        if sha256 not in known and not may_be_missing(ref, forgotten)
    ]


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name once it is whole and durable, unless the name is taken."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # refuses to overwrite; a rename would replace
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except FileExistsError as error:
        raise WrongUsage(f"{path} is there already; a bundle is never overwritten") from error
    except OSError as error:
        raise WriteFailed(f"cannot write {path}: {error.strerror}") from error


class BundleObjects:
    """A bundle as the backend of a store that is only read."""

    def __init__(self, file: BinaryIO, *, path: str) -> None:
        """Raise BundleRefused unless the file is a bundle, and whole."""
        self._file = file
        self._path = path
        self.index, begin = self._read_index()
        self._places: dict[str, tuple[int, BundledObject]] = {}
        for one in self.index.objects:
            if one.name in self._places or all(parse(one.name) is None for parse in _KNOWN):
                raise BundleRefused(path, f"{one.name[:80]!r} has no place in a store")
            self._places[one.name] = begin, one
            begin += one.bytes
        if begin != os.fstat(file.fileno()).st_size:
            raise BundleRefused(path, "it is cut short, or something follows its end")

    def _read_index(self) -> tuple[BundleIndex, int]:
        head = self._file.read(len(MAGIC) + _LENGTH_BYTES)
        length = int.from_bytes(head[len(MAGIC) :], "little")
        if not head.startswith(MAGIC) or len(head) != len(MAGIC) + _LENGTH_BYTES:
            raise BundleRefused(self._path, "it does not begin as one")
        if length > MAX_RECORD_BYTES:
            raise BundleRefused(self._path, "its index is too large")
        sealed = self._file.read(length)
        return unseal_record(f"the index of {self._path}", sealed, BundleIndex), len(head) + length

    def create(self, name: str, data: bytes) -> bool:
        raise WriteFailed(f"{self._path} is a bundle, which is only read")

    def read(self, name: str, *, max_bytes: int) -> bytes:
        if name not in self._places:
            raise ObjectMissing(name)
        begin, one = self._places[name]
        if one.bytes > max_bytes:
            raise ObjectRefused(name, f"it has {one.bytes} bytes, more than {max_bytes}")
        self._file.seek(begin)
        data = self._file.read(one.bytes)
        if hashlib.sha256(data).hexdigest() != one.sha256:
            raise ObjectRefused(name, "its bytes are not those that were bundled")
        return data

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        return [
            Entry(name=name, bytes=one.bytes, modified_s=0.0)
            for name, (_, one) in self._places.items()
            if name.startswith(f"{folder}/") and name > after
        ]

    def list_names(self, folder: str) -> Sequence[str]:
        return [entry.name for entry in self.list(folder)]

    def delete(self, name: str) -> None:
        raise WriteFailed(f"{self._path} is a bundle, which is only read")


def take_bundle(
    path: Path,
    location: str,
    *,
    keys: Keys = NO_KEYS,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Copy what a store lacks out of a bundle, as `copy_store` does; make the store where there is
    none and the bundle is complete. With a trust file only signed versions and records are taken.

    Raise CopyRefused, before anything is written, where versions would lack shards, or are of
    another store.
    """
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise WrongUsage(f"{path} is not a file that can be read")
    with open(path, "rb") as file:
        objects = BundleObjects(file, path=str(path))
        source = Store.open(str(path), objects=objects)
        try:
            target = Store.open(location)
        except StoreNotFound:
            target = None
        _check_complete(source, target, location=location, since=objects.index.since)
        if keys.trust is not None:
            _check_trust(source, target, keys.trust)
        return copy_store(source, target or Store.create(location), keys=keys, progress=progress)


def _check_complete(source: Store, target: Store | None, *, location: str, since: int) -> None:
    there, forgotten = set(list_shards(source)), source.forgotten()
    deleted: set[int] = set()
    if target is not None:
        there |= set(list_shards(target))
        forgotten |= target.forgotten()
        deleted = set(deleted_versions(target.objects))
    for manifest in read_all_manifests(source):
        lacks = (
            ref.sha256 not in there and not may_be_missing(ref, forgotten)
            for ref in manifest.shards
        )
        if manifest.version not in deleted and any(lacks):
            raise CopyRefused(
                f"{location} lacks shards of version {manifest.version}, and {source.location} "
                f"brings those of versions after {since} alone: bundle with a smaller --since"
            )


def _check_trust(source: Store, target: Store | None, trust: Trust) -> None:
    """Raise CopyRefused for a new version or channel record that is not signed by someone trusted.
    Versions that the gate refused are never signed, and nobody serves them."""
    versions = set(target.versions()) if target else set()
    for manifest in read_all_manifests(source):
        gate = manifest.metrics.gate
        is_refused = gate is not None and not gate.passed and not gate.forced
        if manifest.version not in versions and not is_refused:
            with _nothing_taken(source):
                trust.check(manifest, store=source.id)
    for channel in source.channels():
        known = set(target.record_numbers(channel)) if target else set()
        for number in set(source.record_numbers(channel)) - known:
            record, name = source.record(channel, number), record_name(channel, number)
            with _nothing_taken(source):
                trust.check_record(record, name=name, store=source.id)


@contextmanager
def _nothing_taken(source: Store) -> Iterator[None]:
    try:
        yield
    except SignatureRefused as error:
        raise CopyRefused(f"{source.location}: {error}; nothing was taken") from error
