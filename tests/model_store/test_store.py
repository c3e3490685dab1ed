from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from model_store.backends.s3 import ObjectStorage
from model_store.errors import (
    ChannelMoved,
    ChannelNotFound,
    NothingToRollBack,
    RecordInvalid,
    ShardCorrupt,
    ShardMissing,
    StoreNotFound,
    StoreUnsupported,
    VersionNotFound,
    WrongUsage,
)
from model_store.layout import deleted_name, record_name, run_name, shard_name, version_name
from model_store.records.manifest import Manifest
from model_store.records.sealing import seal
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.drafts import Prepared, expert_refs, prepare, publish_lineage, weights

MOVE: dict[str, Any] = {"actor": "ann@host", "reason": "because"}


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


# Publishing


def test_an_empty_store_has_no_versions(store: Store) -> None:
    assert store.versions() == []
    assert store.newest() is None
    assert store.channels() == []
    with pytest.raises(VersionNotFound, match="the store is empty"):
        store.manifest(1)


def test_a_published_version_is_read_back(store: Store) -> None:
    prepared = prepare()
    manifest = prepared.publish(store)
    assert manifest.version == 1
    assert store.manifest(1) == manifest
    for ref in manifest.shards:
        assert store.read_shard(ref) == prepared.shards[ref.sha256]


def test_the_manifest_is_written_last(store: Store, watched: WatchedObjects) -> None:
    watched.calls.clear()
    prepared = prepare()
    prepared.publish(store)
    created = watched.names("create")
    assert created[0] == run_name(prepared.draft.transaction, 1)
    assert created[-1] == version_name(1)
    assert set(created[1:-1]) == {shard_name(sha256) for sha256 in prepared.shards}


def test_until_the_manifest_is_written_nothing_is_visible(
    store: Store, watched: WatchedObjects
) -> None:
    seen: list[list[int]] = []
    other = Store.open("models", objects=watched.objects)
    watched.before = lambda verb, name: seen.append(other.versions()) if verb == "create" else None
    prepare().publish(store)
    assert seen
    assert all(versions == [] for versions in seen)
    assert other.versions() == [1]


def test_publishing_a_child_touches_only_what_is_new(store: Store, watched: WatchedObjects) -> None:
    parent = prepare().publish(store)
    prepared = prepare(parent=parent, seed=1)
    watched.calls.clear()
    child = prepared.publish(store)
    new = {shard_name(sha256) for sha256 in prepared.shards}
    run = run_name(prepared.draft.transaction, 1)
    assert sorted(watched.names("create")) == sorted([run, *new, version_name(2)])
    assert watched.names("delete") == [run]
    assert watched.names("read") == [version_name(1), deleted_name(1), deleted_name(2)]
    assert len(prepared.shards) == 4  # expert, classifier, and two classes of memory
    assert expert_refs(child)[0] == expert_refs(parent)[0]


def test_the_cost_of_a_publish_does_not_grow_with_the_store(
    store: Store, watched: WatchedObjects
) -> None:
    costs: list[int] = []
    parent: Manifest | None = None
    for seed in range(6):
        prepared = prepare(parent=parent, seed=seed)
        watched.calls.clear()
        parent = prepared.publish(store)
        costs.append(len(watched.calls))
    assert len(set(costs[1:])) == 1


def test_a_shard_that_is_there_already_is_hashed_again(
    store: Store, watched: WatchedObjects
) -> None:
    prepared = prepare()
    prepared.publish(store)
    watched.calls.clear()
    Prepared(prepare().draft, prepared.shards).publish(store)
    if not isinstance(watched.objects, ObjectStorage):  # which has compared the bytes already
        assert {shard_name(sha256) for sha256 in prepared.shards} <= set(watched.names("read"))
    assert store.versions() == [1, 2]


def test_a_corrupt_shard_that_is_there_already_stops_the_publish_by_name(
    store: Store, watched: WatchedObjects
) -> None:
    prepared = prepare()
    sha256 = prepared.draft.classifier.sha256
    watched.objects.create(shard_name(sha256), b"x" * prepared.draft.classifier.bytes)
    with pytest.raises(ShardCorrupt, match=sha256):
        prepared.publish(store)
    assert store.versions() == []


def test_a_shard_that_nobody_has_stops_the_publish(store: Store) -> None:
    prepared = prepare()
    del prepared.shards[prepared.draft.classifier.sha256]
    with pytest.raises(ShardMissing, match=prepared.draft.classifier.sha256):
        prepared.publish(store)
    assert store.versions() == []


def test_bytes_that_are_not_what_the_draft_says_are_not_written(
    store: Store, watched: WatchedObjects
) -> None:
    prepared = prepare()
    prepared.shards[prepared.draft.classifier.sha256] += b"!"
    watched.calls.clear()
    with pytest.raises(ShardCorrupt):
        prepared.publish(store)
    assert watched.names("create") == []


def test_a_classifier_of_another_shape_is_not_published(store: Store) -> None:
    prepared = prepare()
    odd = weights({"heads.0.weight": (1, 1), "heads.0.bias": (1,)}, seed=0)
    ref = shard_ref("classifier", odd)
    draft = prepared.draft.model_copy(update={"classifier": ref})
    with pytest.raises(ShardCorrupt, match=r"heads\.0"):
        store.publish(draft, shards={**prepared.shards, ref.sha256: odd})
    assert store.versions() == []


def test_a_parent_must_be_there_and_be_the_one_that_was_meant(store: Store) -> None:
    parent = prepare().publish(store)
    draft = prepare(parent=parent, seed=1)
    for update in ({"parent": 7}, {"parent_digest": "0" * 64}):
        wrong = Prepared(draft.draft.model_copy(update=update), draft.shards)
        with pytest.raises((VersionNotFound, RecordInvalid)):
            wrong.publish(store)
    assert store.versions() == [1]


def test_numbers_only_rise_and_history_is_a_tree(store: Store) -> None:
    first, *_ = publish_lineage(store, 3)
    branch = prepare(parent=first, task="branch", seed=9).publish(store)
    assert (branch.version, branch.parent) == (4, 1)


def test_a_number_that_was_taken_in_the_meantime_is_left_to_its_owner(
    store: Store, watched: WatchedObjects
) -> None:
    rival = Store.open("models", objects=watched.objects)
    taken: list[Manifest] = []

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", version_name(1)) and not taken:
            taken.append(prepare(task="rival", seed=5).publish(rival))

    watched.before = overtake
    ours = prepare().publish(store)
    assert (taken[0].version, ours.version) == (1, 2)
    assert store.manifest(1) == taken[0]


def test_racing_publishers_lose_nothing(tmp_path: Path) -> None:
    location = str(tmp_path / "models")
    Store.create(location)
    published: list[Manifest] = []

    def publish(seed: int) -> None:
        store = Store.open(location)
        published.extend(prepare(images=0, seed=seed + n).publish(store) for n in range(4))

    threads = [threading.Thread(target=publish, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = Store.open(location)
    assert store.versions() == list(range(1, 17))
    assert {store.manifest(n).transaction for n in store.versions()} == {
        manifest.transaction for manifest in published
    }
    assert store.verify().ok


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


# Channels


def test_a_channel_names_what_was_promoted_last(store: Store) -> None:
    publish_lineage(store, 2)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode, head.number) == (2, "follow", 2)
    assert store.channels() == ["production"]
    assert store.head("empty") is None


def test_the_head_costs_one_listing_and_one_read(store: Store, watched: WatchedObjects) -> None:
    publish_lineage(store, 2)
    for _ in range(20):
        store.promote(1, channel="production", **MOVE)
    watched.calls.clear()
    store.head("production")
    assert [verb for verb, _ in watched.calls] == ["list", "read"]


def test_rollback_moves_no_shards(store: Store, watched: WatchedObjects) -> None:
    publish_lineage(store, 3)
    watched.calls.clear()
    store.rollback(channel="production", to=1, **MOVE)
    assert watched.names("create") == [record_name("production", 4)]
    assert watched.names("delete") == []
    assert not any(name.startswith("shards/") for _, name in watched.calls)


def test_rollback_is_recorded_with_who_when_and_why(store: Store) -> None:
    publish_lineage(store, 2)
    record = store.rollback(channel="production", to=None, **MOVE)
    assert store.history("production")[-1] == record
    assert (record.target, record.mode) == (1, "pin")
    assert (record.actor, record.reason) == ("ann@host", "because")
    assert record.time.endswith("Z")


def test_rolling_back_twice_goes_two_back_and_resume_undoes_both(store: Store) -> None:
    publish_lineage(store, 3)
    assert store.rollback(channel="production", to=None, **MOVE).target == 2
    assert store.rollback(channel="production", to=None, **MOVE).target == 1
    with pytest.raises(NothingToRollBack):
        store.rollback(channel="production", to=None, **MOVE)
    resumed = store.resume(channel="production", **MOVE)
    assert (resumed.target, resumed.mode) == (3, "follow")


def test_a_rollback_stays_when_versions_are_published(store: Store) -> None:
    first, second = publish_lineage(store, 2)
    store.rollback(channel="production", to=first.version, **MOVE)
    prepare(parent=second, seed=7).publish(store)
    head = store.head("production")
    assert head is not None
    assert (head.target, head.mode) == (1, "pin")


def test_a_version_that_does_not_exist_moves_no_channel(store: Store) -> None:
    publish_lineage(store, 2)
    with pytest.raises(VersionNotFound):
        store.rollback(channel="production", to=9, **MOVE)
    with pytest.raises(VersionNotFound):
        store.promote(9, channel="production", **MOVE)
    assert len(store.history("production")) == 2


def test_a_channel_that_names_nothing_cannot_go_back_or_on(store: Store) -> None:
    publish_lineage(store, 1)
    with pytest.raises(ChannelNotFound, match="staging names no version yet"):
        store.rollback(channel="staging", to=1, **MOVE)
    with pytest.raises(ChannelNotFound):
        store.resume(channel="staging", **MOVE)
    assert store.channels() == ["production"]


def test_a_channel_that_moved_on_is_not_promoted_over(store: Store) -> None:
    publish_lineage(store, 3)
    store.rollback(channel="production", to=1, **MOVE)
    for after in (0, 3, 5):
        with pytest.raises(ChannelMoved, match="version 2 was not promoted"):
            store.promote(2, channel="production", after=after, **MOVE)
    assert store.promote(2, channel="production", after=4, **MOVE).number == 5
    assert store.promote(2, channel="fresh", after=0, **MOVE).number == 1


def _overtaking(watched: WatchedObjects, number: int, *, target: int) -> None:
    """Somebody else writes record `number` just before we do."""
    rival = Store.open("models", objects=watched.objects)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", record_name("production", number)):
            watched.before = lambda verb, name: None
            rival.promote(target, channel="production", actor="rival", reason="")

    watched.before = overtake


def test_two_who_promote_at_once_do_not_overwrite_each_other(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    _overtaking(watched, 4, target=1)
    with pytest.raises(ChannelMoved):
        store.promote(2, channel="production", after=3, **MOVE)
    assert store.promote(2, channel="production", **MOVE).number == 5


def test_a_rollback_that_was_overtaken_chooses_its_target_again(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    _overtaking(watched, 4, target=1)
    record = store.rollback(channel="production", to=None, **MOVE)
    assert (record.number, record.target) == (5, 3)


def test_a_rollback_that_was_overtaken_while_it_chose_chooses_again(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 3)
    rival = Store.open("models", objects=watched.objects)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("read", record_name("production", 3)):
            watched.before = lambda verb, name: None
            rival.promote(1, channel="production", actor="rival", reason="")

    watched.before = overtake
    record = store.rollback(channel="production", to=None, **MOVE)
    assert (record.number, record.target) == (5, 3)


def test_a_record_whose_version_was_exchanged_is_not_resolved(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 1)
    head = store.head("production")
    assert head is not None
    assert store.resolve(head).version == 1
    watched.objects.delete(version_name(1))
    prepare(task="other", seed=3).publish(store)
    with pytest.raises(RecordInvalid, match="another version 1"):
        store.resolve(head)


def test_a_damaged_history_does_not_stop_a_rollback_to_a_named_version(
    store: Store, watched: WatchedObjects
) -> None:
    publish_lineage(store, 2)
    watched.objects.delete(record_name("production", 2))
    watched.objects.create(record_name("production", 2), b"garbage")
    with pytest.raises(RecordInvalid):
        store.head("production")
    store.rollback(channel="production", to=1, **MOVE)
    head = store.head("production")
    assert head is not None
    assert head.target == 1


@pytest.mark.parametrize("reason", ["x" * 2001, "\ud800"])
def test_a_reason_that_cannot_be_kept_is_wrong_usage(store: Store, reason: str) -> None:
    publish_lineage(store, 1)
    with pytest.raises(WrongUsage):
        store.promote(1, channel="production", actor="a", reason=reason)


@pytest.mark.parametrize("channel", ["../versions", "", "a/b", "production\n"])
def test_a_hostile_channel_name_is_wrong_usage(store: Store, channel: str) -> None:
    publish_lineage(store, 1)
    with pytest.raises(WrongUsage):
        store.head(channel)
    with pytest.raises(WrongUsage):
        store.promote(1, channel=channel, **MOVE)
