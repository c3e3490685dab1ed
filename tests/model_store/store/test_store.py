from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import (
    RecordInvalid,
    ShardCorrupt,
    StoreNotFound,
    StoreUnsupported,
    VersionNotFound,
)
from model_store.layout import shard_name
from model_store.records.sealing import seal
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.drafts import publish_lineage

# The store itself


def test_a_store_keeps_its_id(watched: WatchedObjects) -> None:
    made = Store.create("models", objects=watched)
    assert Store.create("models", objects=watched).id == made.id
    assert Store.open("models", objects=watched).id == made.id


def test_where_there_is_no_store_none_is_opened_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="there is no store at"):
        Store.open(str(tmp_path / "models"))
    assert list(tmp_path.iterdir()) == []


def test_opening_writes_nothing_and_probes_nothing(store: Store, watched: WatchedObjects) -> None:
    watched.calls.clear()
    Store.open("models", objects=watched)
    assert watched.calls == [("read", "store.json")]


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "models"))
    names = {path.name for path in (tmp_path / "models").rglob("*")}
    assert names == {"store.json", "tmp", "reserve", "room"}


class Overwriting(MemoryObjects):
    def create(self, name: str, data: bytes) -> bool:
        self.held[name] = data
        return True


def test_a_backend_that_overwrites_is_refused_and_left_empty() -> None:
    backend = Overwriting()
    with pytest.raises(StoreUnsupported, match="overwrites"):
        Store.create("models", objects=backend)
    assert backend.held == {}


@pytest.mark.parametrize("format_number", [0, 2])
def test_a_store_of_another_format_is_refused(format_number: int) -> None:
    backend = MemoryObjects()
    backend.create("store.json", seal({"format": format_number, "id": "0" * 32}))
    with pytest.raises(StoreUnsupported):
        Store.open("models", objects=backend)


def test_versions_without_store_json_are_not_made_a_new_store() -> None:
    backend = MemoryObjects()
    publish_lineage(Store.create("models", objects=backend), 1)
    backend.delete("store.json")
    with pytest.raises(RecordInvalid, match="missing, although there are versions"):
        Store.create("models", objects=backend)


# Reading


@pytest.mark.parametrize("version", [-1, 0, 2, 10**9])
def test_a_version_that_does_not_exist_is_named_with_the_newest(store: Store, version: int) -> None:
    publish_lineage(store, 1)
    with pytest.raises(VersionNotFound, match=f"no version {version}; the newest is 1"):
        store.manifest(version)


def test_a_shard_with_one_flipped_bit_is_not_read(store: Store, watched: WatchedObjects) -> None:
    (manifest,) = publish_lineage(store, 1)
    ref = manifest.classifier
    data = bytearray(store.read_shard(ref))
    data[-1] ^= 1
    watched.objects.delete(shard_name(ref.sha256))
    watched.objects.create(shard_name(ref.sha256), bytes(data))
    with pytest.raises(ShardCorrupt, match=ref.sha256):
        store.read_shard(ref)


@pytest.mark.parametrize("wrong", [b"", b"short", b"x" * 100_000])
def test_a_shard_of_another_size_is_not_read(
    store: Store, watched: WatchedObjects, wrong: bytes
) -> None:
    (manifest,) = publish_lineage(store, 1)
    watched.objects.delete(shard_name(manifest.classifier.sha256))
    watched.objects.create(shard_name(manifest.classifier.sha256), wrong)
    with pytest.raises(ShardCorrupt):
        store.read_shard(manifest.classifier)


def test_strange_names_among_the_versions_are_passed_over(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 1)
    for name in ("versions/00000000.json", "versions/9.json", "versions/00000002.json.bak"):
        watched.objects.create(name, b"")
    assert store.versions() == [1]
