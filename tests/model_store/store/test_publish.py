"""Publish versions: the order of writes, their cost, races, and refusals."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from model_store.backends.s3 import ObjectStorage
from model_store.errors import (
    RecordInvalid,
    ShardCorrupt,
    ShardMissing,
    VersionNotFound,
)
from model_store.layout import deleted_name, run_name, shard_name, version_name
from model_store.records.manifest import Manifest
from model_store.store.shard import shard_ref
from model_store.store.store import Store
from tests.model_store.backends import WatchedObjects
from tests.model_store.drafts import Prepared, expert_refs, prepare, publish_lineage, weights


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
