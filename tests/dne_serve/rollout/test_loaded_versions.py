"""Versions in memory: which stay, which leave, and when."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dne_serve.engines.base import (
    Fetched,
    Query,
    ReadShard,
    Resident,
    Steps,
)
from dne_serve.errors import NoRoom
from dne_serve.rollout.loaded_versions import (
    EngineRoom,
    ImageBatcher,
    LoadedLimits,
    LoadedVersions,
    bytes_of,
)
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock, FakeEngine
from tests.tiny_versions import publish_tiny


def test_least_recently_used_versions_leave_and_the_served_one_stays(
    store: Store, loaded: LoadedVersions, engine: FakeEngine
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(5)]
    loaded.serve(loaded.load(made[0], shards=store))
    for manifest in made[1:3]:
        loaded.load(manifest, shards=store)
    assert loaded.find_version(2) is not None  # used: now 3 is the one unused for longest
    loaded.load(made[3], shards=store)
    assert loaded.find_version(3) is None
    assert engine.kept == [1, 2, 4]
    loaded.load(made[4], shards=store)
    assert engine.kept == [1, 4, 5]
    assert loaded.count == 3


def test_a_version_wanted_by_many_is_loaded_once(
    store: Store, letters: Manifest, loaded: LoadedVersions, engine: FakeEngine
) -> None:
    def load() -> None:
        loaded.load(letters, shards=store)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.loaded == [1]


def test_versions_that_nobody_asks_for_leave_after_a_while(
    store: Store, loaded: LoadedVersions, engine: FakeEngine, clock: Clock
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(3)]
    loaded.serve(loaded.load(made[0], shards=store))
    for manifest in made[1:]:
        loaded.load(manifest, shards=store)
    clock.now = 50
    assert loaded.find_version(3) is not None
    clock.now = 61
    loaded.sweep()
    assert engine.kept == [1, 3]
    clock.now = 1000
    loaded.sweep()
    assert engine.kept == [1]


def test_versions_that_stand_beside_the_served_one_do_not_leave(
    store: Store, loaded: LoadedVersions, clock: Clock
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(2)]
    served, beside = (loaded.load(manifest, shards=store) for manifest in made)
    loaded.serve(served)
    loaded.stand_beside([beside])
    clock.now = 1000
    loaded.sweep()
    assert loaded.find_version(2) is beside


def test_memory_says_what_is_kept(
    store: Store, engine: FakeEngine, batcher: ImageBatcher, clock: Clock
) -> None:
    trunk = publish_tiny(store, tasks=[("t", ["a"])])
    others = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(1, 4)]
    child = publish_tiny(store, tasks=[("u", ["b"])], parent=trunk, seed=9)
    limits = LoadedLimits(spare=9, max_bytes=bytes_of([trunk, *others[:2]]))
    loaded = LoadedVersions(EngineRoom(engine, batcher=batcher), limits=limits, clock=clock)
    loaded.serve(loaded.load(trunk, shards=store))
    for manifest in others:
        loaded.load(manifest, shards=store)
    assert engine.kept == [1, 3, 4]
    assert bytes_of(loaded.manifests) <= bytes_of([trunk, *others[:2]])

    tight = LoadedLimits(spare=9, max_bytes=bytes_of([trunk]))
    loaded = LoadedVersions(EngineRoom(engine, batcher=batcher), limits=tight, clock=clock)
    loaded.serve(loaded.load(trunk, shards=store, needed=True))
    with pytest.raises(NoRoom, match="version 5 does not fit"):
        loaded.load(child, shards=store)
    # What the channel names comes in, and the one before it leaves.
    loaded.serve(loaded.load(child, shards=store, needed=True))
    assert engine.kept == [5]


def test_who_has_to_leave_for_a_version_leaves_before_it_takes_memory(
    store: Store, batcher: ImageBatcher, clock: Clock
) -> None:
    at_fetch: list[list[int]] = []

    class Watching(FakeEngine):
        def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
            at_fetch.append([one.version for one in loaded.manifests])
            return super().fetch(manifest, read=read)

    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(4)]
    for limits in (LoadedLimits(spare=1), LoadedLimits(spare=9, max_bytes=bytes_of(made[:2]))):
        at_fetch.clear()
        loaded = LoadedVersions(EngineRoom(Watching(), batcher=batcher), limits=limits, clock=clock)
        for manifest in made:
            loaded.serve(loaded.load(manifest, shards=store))
        assert at_fetch == [[], [1], [2], [3]]
        assert [one.version for one in loaded.manifests] == [3, 4]


def test_experts_that_versions_share_count_once(store: Store) -> None:
    trunk = publish_tiny(store, tasks=[("t", ["a"])])
    child = publish_tiny(store, tasks=[("u", ["b"])], parent=trunk, seed=9)
    refs = {*trunk.model_shards, *child.model_shards}
    assert len(refs) == 4
    assert bytes_of([trunk, child]) == sum(ref.bytes for ref in refs)


def test_the_engine_answers_between_the_steps_of_a_load(
    store: Store, letters: Manifest, engine: FakeEngine, batcher: ImageBatcher
) -> None:
    loaded = LoadedVersions(EngineRoom(engine, batcher=batcher), limits=LoadedLimits())
    answered: list[bool] = []

    class Slow(FakeEngine):
        def load(self, fetched: Fetched) -> Steps[Resident]:
            for _ in range(3):
                query = Query(pixels=np.zeros((8, 8, 3), dtype=np.uint8), residents=(first,))
                [answer] = batcher.submit(first, items=[query])
                yield
                answered.append(answer.done())
            return (yield from super().load(fetched))

    first = loaded.load(letters, shards=store)
    second = publish_tiny(store, tasks=[("digits", ["0"])], parent=letters)
    LoadedVersions(EngineRoom(Slow(), batcher=batcher), limits=LoadedLimits()).load(
        second, shards=store
    )
    assert answered == [True, True, True]
