"""Count the requests of following a channel, by the server's own code on a bucket in memory.

The reloader, the residents and the engine are those of `dne-serve`. Only the bucket is a fake: it
writes down every request and the bytes of its answer. A listing takes a request for each 1,000
names, as in S3.
"""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.rollout.channel import SameStore
from dne_serve.rollout.loaded_versions import EngineRoom, ImageBatcher, LoadedLimits, LoadedVersions
from dne_serve.rollout.reloader import NEXT_POLLS, Reloader
from model_store.backends.base import Entry, ObjectMissing
from model_store.layout import TMP, record_name, shard_of
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.records.sealing import seal_record
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects

PAGE_NAMES = 1000
NAME_BYTES = 300
"""Of one name in the XML of a listing, with its ETag, size and time."""
CHANNEL = "production"
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to the bucket. A shard never changes, so a cache may answer for it."""

    verb: Literal["get", "list"]
    bytes: int
    is_shard: bool = False


Requests = tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The requests of each thing that a replica does, in order, and how long loading takes."""

    glance: Requests
    look: Requests
    start: Requests
    release: Requests
    """The poll that finds a new version: a glance, a look, the manifest and the delta."""
    rollback: Requests
    """The poll that finds a rollback to a version in memory."""
    load_s: float
    """Seconds that the engine takes to check and load a delta that is there."""
    start_s: float
    """The same for the whole version."""
    delta_bytes: int
    model_bytes: int


class Bucket(MemoryObjects):
    """Objects in memory that write down the requests that a bucket would get."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def read(self, name: str, *, max_bytes: int) -> bytes:
        try:
            data = super().read(name, max_bytes=max_bytes)
        except ObjectMissing:
            self.requests.append(Request(verb="get", bytes=0))  # billed, too
            raise
        is_shard = shard_of(name) is not None
        self.requests.append(Request(verb="get", bytes=len(data), is_shard=is_shard))
        return data

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        found = super().list(folder, after=after)
        for page in range(max(1, math.ceil(len(found) / PAGE_NAMES))):
            names = min(PAGE_NAMES, len(found) - page * PAGE_NAMES)
            self.requests.append(Request(verb="list", bytes=NAME_BYTES * names))
        return found

    def during(self, work: Callable[[], object]) -> Requests:
        """Run `work` and return the requests that it sent."""
        before = len(self.requests)
        work()
        return tuple(self.requests[before:])


def copy_of(location: Path) -> Bucket:
    """Copy a store in a directory into a bucket."""
    bucket = Bucket()
    for path in sorted(location.rglob("*")):
        name = path.relative_to(location).as_posix()
        if path.is_file() and not name.startswith(f"{TMP}/"):
            bucket.held[name] = path.read_bytes()
    return bucket


def count_requests(bucket: Bucket, *, older: int, newer: int, records: int = 0) -> Episodes:
    """Let a replica start with version `older`, find its child `newer`, and find a rollback. The
    channel gets `records` more records first, as after a long history."""
    store = Store.open("memory", objects=bucket)
    _move(store, older)
    _write_records(bucket, store.record(CHANNEL, store.record_numbers(CHANNEL)[-1]), records)
    manifests = [store.manifest(number) for number in (older, newer)]
    with following(bucket) as reloader:
        reloader.poll()
        glance = bucket.during(reloader.poll)
        for _ in range(NEXT_POLLS - 1):
            reloader.poll()
        look = bucket.during(reloader.poll)
        _move(store, newer)
        release = bucket.during(reloader.poll)
        with following(bucket) as another:
            start = bucket.during(another.poll)
        _move(store, older)
        rollback = bucket.during(reloader.poll)
        _check_served(reloader, older)
    return Episodes(
        glance=glance,
        look=look,
        start=start,
        release=release,
        rollback=rollback,
        load_s=_load_s(store, *manifests),
        start_s=_load_s(store, manifests[1]),
        delta_bytes=total_bytes(delta_of(manifests[1], manifests[0])),
        model_bytes=total_bytes(manifests[1].model_shards),
    )


@contextmanager
def following(bucket: Bucket) -> Iterator[Reloader]:
    """Make a reloader with the server's engine that follows the channel in the bucket."""
    with (
        loading() as loaded,
        mock.patch("model_store.store.store.objects_at", return_value=bucket),
    ):
        yield Reloader(SameStore("memory"), loaded=loaded, channel=CHANNEL, poll_s=1.0)


@contextmanager
def loading() -> Iterator[LoadedVersions]:
    """Make residents with the server's engine and without versions."""
    engine = TorchEngine(device="cpu", threads=1)
    batcher = ImageBatcher(engine.run, max_batch=1, max_queue=1)
    batcher.start()
    try:
        yield LoadedVersions(EngineRoom(engine, batcher=batcher), limits=LoadedLimits())
    finally:
        batcher.stop()


def _load_s(store: Store, *manifests: Manifest) -> float:
    """Take the processor time of loading the last of these versions beside the others: the median
    of rounds."""
    took_s = []
    for _ in range(ROUNDS):
        with loading() as loaded:
            for manifest in manifests:
                began_s = time.process_time()
                loaded.load(manifest, shards=store)
            took_s.append(time.process_time() - began_s)
    return statistics.median(took_s)


def _move(store: Store, version: int) -> None:
    store.promote(version, channel=CHANNEL, actor="benchmarks", reason="")


def _write_records(bucket: Bucket, like: ChannelRecord, count: int) -> None:
    """Append records past the store's own way, which lists the channel before each."""
    for number in range(like.number + 1, like.number + 1 + count):
        record = like.model_copy(update={"number": number, "transaction": uuid.uuid4().hex})
        bucket.held[record_name(CHANNEL, number)] = seal_record(record)


def _check_served(reloader: Reloader, version: int) -> None:
    if reloader.failure is not None:
        raise reloader.failure.error
    if reloader.record is None or reloader.record.target != version:
        raise RuntimeError(f"the replica does not serve version {version}")
