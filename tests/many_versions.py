"""Thousands of valid versions in seconds: their manifests are written past the store's own way
of publishing, which reads, hashes and syncs. The shards are those of one real version."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from model_store.layout import record_name, version_name
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest, encode
from model_store.records.quality import Gate
from model_store.records.sealing import seal_record
from model_store.store.store import Store
from tests.model_store.drafts import CREATED, publish_lineage


def write_versions(location: Path, *, count: int, tasks: int = 4) -> Store:
    """A store with `count` versions, each the child of the one before, and a record of channel
    production for each. From version `tasks` on they have the tasks and shards of that one, as
    versions have that only rename or extend; every tenth was refused by the gate."""
    store = Store.create(str(location))
    publish_lineage(store, tasks)
    lengthen(location, count=count)
    return store


def lengthen(location: Path, *, count: int) -> None:
    """Write versions like the newest of a store until there are `count`, and promote each."""
    store = Store.open(str(location))
    pattern = store.manifest(store.versions()[-1])
    moves = max(store.record_numbers("production"), default=0)
    digest = pattern.digest
    for number in range(pattern.version + 1, count + 1):
        moves += 1
        digest = _write_version(location, pattern, number=number, parent_digest=digest)
        _write_record(location, moves, target=number, digest=digest)


def _write_version(location: Path, pattern: Manifest, *, number: int, parent_digest: str) -> str:
    """Write the child of version `number - 1`; its digest."""
    gate = Gate(passed=False, reasons=("it fell",)) if number % 10 == 0 else Gate(passed=True)
    draft = pattern.model_copy(
        update={
            "parent": number - 1,
            "parent_digest": parent_digest,
            "transaction": uuid.uuid4().hex,
            "metrics": pattern.metrics.model_copy(update={"gate": gate}),
        }
    )
    sealed = encode(draft, version=number)
    (location / version_name(number)).write_bytes(sealed)
    return str(json.loads(sealed)["digest"])


def _write_record(location: Path, number: int, *, target: int, digest: str) -> None:
    record = ChannelRecord(
        channel="production",
        number=number,
        target=target,
        target_digest=digest,
        mode="follow",
        actor="a@b",
        reason="",
        time=CREATED,
        transaction=uuid.uuid4().hex,
    )
    (location / record_name("production", number)).write_bytes(seal_record(record))
