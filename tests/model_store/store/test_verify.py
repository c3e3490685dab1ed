from __future__ import annotations

import struct

import pytest

from model_store.errors import VersionNotFound
from model_store.layout import record_name, shard_name, version_name
from model_store.records.manifest import Manifest, encode
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.backends import WatchedObjects
from tests.model_store.drafts import image_shard, prepare, publish_lineage


def _replace(watched: WatchedObjects, name: str, data: bytes) -> None:
    """What no honest writer does."""
    watched.objects.delete(name)
    watched.objects.create(name, data)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture
def lineage(store: Store) -> list[Manifest]:
    return publish_lineage(store, 3)


@pytest.mark.usefixtures("lineage")
def test_an_intact_store_has_no_problem(store: Store) -> None:
    report = store.verify()
    assert report.ok
    assert (report.problems, report.unused) == ((), ())
    assert (report.versions, report.shards, report.records) == (3, 3 + 3 + 6, 3)
    assert report.bytes > 0


@pytest.mark.usefixtures("lineage")
def test_every_shard_is_read_once(store: Store, watched: WatchedObjects) -> None:
    watched.calls.clear()
    store.verify()
    shards = [name for name in watched.names("read") if name.startswith("shards/")]
    assert len(shards) == len(set(shards)) == 12
    assert watched.names("create") == watched.names("delete") == []


@pytest.mark.parametrize("kind", ["expert", "classifier", "memory"])
def test_a_flipped_bit_in_a_shard_is_named(
    store: Store, watched: WatchedObjects, lineage: list[Manifest], kind: str
) -> None:
    ref = next(ref for ref in lineage[1].shards if ref.kind == kind)
    data = store.read_shard(ref)
    for bit in (0, 8 * 20, 8 * len(data) - 1):
        _replace(watched, shard_name(ref.sha256), _flipped(data, bit))
        report = store.verify()
        assert not report.ok
        assert all(ref.sha256 in problem for problem in report.problems)


def test_a_missing_shard_is_named(
    store: Store, watched: WatchedObjects, lineage: list[Manifest]
) -> None:
    watched.objects.delete(shard_name(lineage[2].classifier.sha256))
    (problem,) = store.verify().problems
    assert lineage[2].classifier.sha256 in problem
    assert "missing" in problem
    assert "classifier of version 3" in problem


@pytest.mark.usefixtures("lineage")
def test_a_damaged_manifest_is_named_and_so_is_what_hangs_on_it(
    store: Store, watched: WatchedObjects
) -> None:
    name = version_name(2)
    _replace(watched, name, _flipped(watched.objects.read(name, max_bytes=1 << 20), 300))
    problems = store.verify().problems
    assert any(problem.startswith(name) for problem in problems)
    assert any(problem.startswith(version_name(3)) for problem in problems)
    assert any(problem.startswith(record_name("production", 2)) for problem in problems)


def test_a_manifest_that_was_exchanged_breaks_the_chain(
    store: Store, watched: WatchedObjects, lineage: list[Manifest]
) -> None:
    forged = lineage[0].model_copy(update={"software": "forged"})
    draft = prepare().draft.model_validate(
        forged.model_dump(exclude={"version", "digest", "signature"})
    )
    _replace(watched, version_name(1), encode(draft, version=1))
    problems = store.verify().problems
    assert any(
        problem.startswith(version_name(2)) and "another version 1" in problem
        for problem in problems
    )
    assert any(problem.startswith(record_name("production", 1)) for problem in problems)
    assert not store.verify(3).ok


@pytest.mark.usefixtures("lineage")
@pytest.mark.parametrize("damage", ["removed", "garbage", "moved"])
def test_a_damaged_channel_record_is_named(
    store: Store, watched: WatchedObjects, damage: str
) -> None:
    name = record_name("production", 2)
    other = watched.objects.read(record_name("production", 1), max_bytes=1 << 20)
    if damage == "removed":
        watched.objects.delete(name)
    else:
        _replace(watched, name, b"{}" if damage == "garbage" else other)
    (problem,) = store.verify().problems
    assert problem.startswith(name)


def test_a_shard_of_the_right_digest_with_a_value_that_is_not_finite_is_named(
    store: Store, watched: WatchedObjects
) -> None:
    prepared = prepare()
    good = prepared.shards.pop(prepared.draft.classifier.sha256)
    bad = good[:-4] + struct.pack("<f", float("nan"))
    ref = shard_ref("classifier", bad)
    for data in (*prepared.shards.values(), bad):
        watched.objects.create(shard_name(shard_ref("expert", data).sha256), data)
    forged = prepared.draft.model_copy(update={"classifier": ref})
    watched.objects.create(version_name(1), encode(forged, version=1))
    (problem,) = store.verify().problems
    assert ref.sha256 in problem
    assert "not finite" in problem


def test_a_memory_shard_with_too_few_images_is_named(store: Store) -> None:
    prepared = prepare(images=2)
    (first, *rest) = prepared.draft.memory
    greedy = prepared.draft.model_copy(
        update={"memory": (first.model_copy(update={"count": 3}), *rest)}
    )
    store.publish(greedy, shards=prepared.shards)
    (problem,) = store.verify().problems
    assert first.shard.sha256 in problem
    assert "fewer than the 3 images" in problem


def test_what_nobody_uses_is_told_and_is_no_problem(store: Store, watched: WatchedObjects) -> None:
    lost = prepare(seed=9)
    sha256, data = next(iter(lost.shards.items()))
    watched.objects.create(shard_name(sha256), data)
    watched.objects.create("versions/notes.txt", b"")
    watched.objects.create("channels/notes.txt", b"")
    report = store.verify()
    assert report.ok
    assert set(report.unused) == {
        shard_name(sha256), "versions/notes.txt", "channels/notes.txt"
    }  # fmt: skip


def test_a_wrong_shard_that_nobody_uses_is_a_problem(store: Store, watched: WatchedObjects) -> None:
    watched.objects.create(shard_name("0" * 64), image_shard([b"x"]))
    (problem,) = store.verify().problems
    assert "0" * 64 in problem


@pytest.mark.usefixtures("lineage")
def test_one_version_is_checked_with_its_ancestors_and_nothing_else(
    store: Store, watched: WatchedObjects
) -> None:
    watched.calls.clear()
    report = store.verify(2)
    assert report.ok
    assert (report.versions, report.records) == (2, 0)
    assert version_name(3) not in watched.names("read")


@pytest.mark.usefixtures("lineage")
def test_a_version_that_does_not_exist_cannot_be_verified(store: Store) -> None:
    with pytest.raises(VersionNotFound):
        store.verify(4)


@pytest.mark.usefixtures("lineage")
def test_a_damaged_store_json_is_named(store: Store, watched: WatchedObjects) -> None:
    _replace(watched, "store.json", b"{}")
    (problem,) = store.verify().problems
    assert problem.startswith("store.json")
