from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dne_serve.engines.base import (
    Answers,
    Fetched,
    Floats,
    Model,
    Query,
    ReadShard,
    Resident,
    Steps,
)
from dne_serve.rollout.reloader import MAX_FALLBACKS, NICENESS, Reloader
from dne_serve.rollout.residents import ImageBatcher, NoRoom, ResidentLimits, Residents, bytes_of
from model_store.errors import ShardCorrupt, StoreNotFound
from model_store.records.manifest import Manifest, ShardRef
from model_store.store.store import Store
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import flip_last_bit, promote, publish_tiny


class FakeModel:
    """A version that answers nothing."""

    def covers(self, other: Model) -> bool:
        return other is self

    def run(self, images: Floats) -> Floats:
        raise NotImplementedError

    def logits(self, passed: Floats, rows: Sequence[int]) -> Floats:
        raise NotImplementedError


class FakeEngine:
    """Loads by remembering. Versions in `broken` cannot be loaded."""

    backend, device = "fake", "cpu"

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.kept: list[int] = []
        self.broken: set[int] = set()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        if manifest.version in self.broken:
            raise ShardCorrupt("0" * 64, "a test said so")
        return Fetched(manifest=manifest, shards={})

    def load(self, fetched: Fetched) -> Steps[Resident]:
        yield
        self.loaded.append(fetched.manifest.version)
        return Resident.of(fetched.manifest, model=FakeModel())

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers]:
        return [(np.zeros(len(widest.labels), dtype=np.float32),) for _ in queries]

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield
        self.kept = sorted(one.version for one in residents)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def batcher(engine: FakeEngine) -> Iterator[ImageBatcher]:
    batcher = ImageBatcher(engine.run, max_batch=4, max_queue=8)
    batcher.start()
    yield batcher
    batcher.stop()


@pytest.fixture
def residents(engine: FakeEngine, batcher: ImageBatcher, clock: Clock) -> Residents:
    return Residents(
        engine, batcher=batcher, limits=ResidentLimits(spare=2, idle_s=60), clock=clock
    )


@pytest.fixture
def reloader(store: Store, residents: Residents, clock: Clock) -> Reloader:
    return Reloader(
        lambda: store, residents=residents, channel="production", poll_s=1.0, clock=clock
    )


def served(residents: Residents) -> int | None:
    return residents.served.version if residents.served else None


def test_it_serves_what_the_channel_names(
    store: Store, letters: Manifest, reloader: Reloader, residents: Residents
) -> None:
    reloader.poll()
    assert served(residents) == 1
    promote(store, publish_tiny(store, tasks=[("digits", ["0"])], parent=letters))
    assert served(residents) == 1
    reloader.poll()
    assert served(residents) == 2
    assert reloader.record == store.head("production")


def test_what_is_withdrawn_stays_away_until_it_is_followed_again(
    store: Store, digits: Manifest, reloader: Reloader, engine: FakeEngine, residents: Residents
) -> None:
    reloader.poll()
    engine.kept = [2]
    reloader.withdraw()
    assert (served(residents), residents.count, engine.kept) == (None, 0, [])
    store.rollback(channel="production", to=1, actor="tests", reason="")
    reloader.poll()
    assert served(residents) is None
    reloader.follow()
    assert served(residents) == 1
    store.resume(channel="production", actor="tests", reason="")
    reloader.poll()
    assert served(residents) == 2


def test_another_channel_does_not_move_it(
    store: Store, letters: Manifest, reloader: Reloader, residents: Residents
) -> None:
    reloader.poll()
    canary = publish_tiny(store, tasks=[("digits", ["0"])], parent=letters)
    promote(store, canary, channel="canary")
    reloader.poll()
    assert served(residents) == 1


def test_going_back_to_a_resident_version_loads_nothing(
    store: Store, digits: Manifest, reloader: Reloader, engine: FakeEngine, residents: Residents
) -> None:
    reloader.poll()
    for to in (1, 2, 1, 2):
        store.promote(to, channel="production", actor="tests", reason="")
        reloader.poll()
        assert served(residents) == to
    assert engine.loaded == [2, 1]


def test_a_failed_load_keeps_the_old_version_and_is_tried_again_with_backoff(
    store: Store,
    letters: Manifest,
    reloader: Reloader,
    residents: Residents,
    engine: FakeEngine,
    clock: Clock,
) -> None:
    reloader.poll()
    engine.broken.add(2)
    promote(store, publish_tiny(store, tasks=[("digits", ["0"])], parent=letters))
    waits = []
    for times in range(1, 9):
        reloader.poll()
        assert served(residents) == 1
        assert reloader.failure is not None
        assert "a test said so" in str(reloader.failure.error)
        assert reloader.failure.times == times
        waits.append(round(reloader.failure.retry_at - clock.now, 6))
        clock.now = reloader.failure.retry_at - 0.01
        reloader.poll()
        assert reloader.failure.times == times
        clock.now += 0.02
    assert waits == sorted(waits)
    assert waits[0] == 2.0
    assert waits[-1] == 30.0
    engine.broken.clear()
    reloader.poll()
    assert served(residents) == 2
    assert reloader.failure is None


def test_a_new_head_is_tried_at_once_after_a_failure(
    store: Store, digits: Manifest, reloader: Reloader, residents: Residents, engine: FakeEngine
) -> None:
    engine.broken |= {1, 2}
    reloader.poll()
    assert served(residents) is None
    engine.broken.remove(1)
    store.rollback(channel="production", to=1, actor="tests", reason="")
    reloader.poll()
    assert served(residents) == 1
    assert (reloader.failure, reloader.fallback) == (None, False)


def test_at_the_start_an_earlier_version_stands_in_for_a_head_that_cannot_be_loaded(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    residents: Residents,
    engine: FakeEngine,
    clock: Clock,
) -> None:
    for seed in (3, 4):
        promote(store, publish_tiny(store, tasks=[("t", [f"c{seed}"])], seed=seed))
    promote(store, digits)  # 1, 2, 3, 4, 2
    engine.broken |= {2, 4}
    reloader.poll()
    assert served(residents) == 3
    assert reloader.fallback
    assert reloader.failure is not None
    assert reloader.failure.record == reloader.head == store.head("production")
    assert reloader.record == store.record("production", 3)
    reloader.poll()
    assert engine.loaded == [3]  # it is served, and the head is not tried before its time
    engine.broken.clear()
    clock.now = reloader.failure.retry_at
    reloader.poll()
    assert served(residents) == 2
    assert (reloader.failure, reloader.fallback) == (None, False)


def test_a_version_that_was_served_is_not_replaced_by_an_earlier_one(
    store: Store, digits: Manifest, reloader: Reloader, residents: Residents, engine: FakeEngine
) -> None:
    reloader.poll()
    engine.broken.add(3)
    promote(store, publish_tiny(store, tasks=[("t", ["c"])], seed=3))
    reloader.poll()
    assert (served(residents), reloader.fallback) == (2, False)


def test_an_unreadable_head_record_is_passed_over_at_the_start(
    store: Store, digits: Manifest, reloader: Reloader, residents: Residents, clock: Clock
) -> None:
    junk = Path(store.location, "channels", "production", "99999999.json")
    junk.write_bytes(b"junk")
    reloader.poll()
    assert (served(residents), reloader.fallback) == (2, True)
    assert "99999999.json cannot be trusted" in str(reloader.failure and reloader.failure.error)
    junk.unlink()
    reloader.poll()
    assert (served(residents), reloader.fallback, reloader.failure) == (2, False, None)


def test_the_way_back_is_bounded(
    store: Store, reloader: Reloader, residents: Residents, engine: FakeEngine, clock: Clock
) -> None:
    tried: list[int] = []
    fetch = engine.fetch
    engine.fetch = lambda manifest, *, read: (  # type: ignore[method-assign]
        tried.append(manifest.version) or fetch(manifest, read=read)  # type: ignore[func-returns-value]
    )
    for seed in range(MAX_FALLBACKS + 3):
        promote(store, publish_tiny(store, tasks=[("t", [f"c{seed}"])], seed=seed))
    engine.broken |= set(range(2, 100))
    reloader.poll()
    newest = MAX_FALLBACKS + 3
    assert tried == [newest - i for i in range(MAX_FALLBACKS + 1)]
    assert served(residents) is None
    reloader.poll()
    assert len(tried) == MAX_FALLBACKS + 1  # with backoff, as the head itself


def test_follow_raises_what_is_in_the_way(
    digits: Manifest, reloader: Reloader, engine: FakeEngine
) -> None:
    engine.broken.add(2)
    with pytest.raises(ShardCorrupt):
        reloader.follow()
    with pytest.raises(ShardCorrupt):  # whoever asks does not have to wait for the backoff
        reloader.follow()


def test_a_store_that_is_absent_is_waited_for(residents: Residents) -> None:
    def absent() -> Store:
        raise StoreNotFound("there is no store at nowhere")

    reloader = Reloader(absent, residents=residents, channel="production", poll_s=0.01)
    reloader.start()
    reloader.stop()
    assert reloader.failure is not None
    assert isinstance(reloader.failure.error, StoreNotFound)


def test_least_recently_used_versions_leave_and_the_served_one_stays(
    store: Store, residents: Residents, engine: FakeEngine
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(5)]
    residents.serve(residents.load(made[0], shards=store))
    for manifest in made[1:3]:
        residents.load(manifest, shards=store)
    assert residents.find_version(2) is not None  # used: now 3 is the one unused for longest
    residents.load(made[3], shards=store)
    assert residents.find_version(3) is None
    assert engine.kept == [1, 2, 4]
    residents.load(made[4], shards=store)
    assert engine.kept == [1, 4, 5]
    assert residents.count == 3


def test_a_version_wanted_by_many_is_loaded_once(
    store: Store, letters: Manifest, residents: Residents, engine: FakeEngine
) -> None:
    def load() -> None:
        residents.load(letters, shards=store)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.loaded == [1]


def test_versions_that_nobody_asks_for_leave_after_a_while(
    store: Store, residents: Residents, engine: FakeEngine, clock: Clock
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(3)]
    residents.serve(residents.load(made[0], shards=store))
    for manifest in made[1:]:
        residents.load(manifest, shards=store)
    clock.now = 50
    assert residents.find_version(3) is not None
    clock.now = 61
    residents.sweep()
    assert engine.kept == [1, 3]
    clock.now = 1000
    residents.sweep()
    assert engine.kept == [1]


def test_versions_that_stand_beside_the_served_one_do_not_leave(
    store: Store, residents: Residents, clock: Clock
) -> None:
    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(2)]
    served, beside = (residents.load(manifest, shards=store) for manifest in made)
    residents.serve(served)
    residents.stand_beside([beside])
    clock.now = 1000
    residents.sweep()
    assert residents.find_version(2) is beside


def test_memory_says_what_is_kept(
    store: Store, engine: FakeEngine, batcher: ImageBatcher, clock: Clock
) -> None:
    trunk = publish_tiny(store, tasks=[("t", ["a"])])
    others = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(1, 4)]
    child = publish_tiny(store, tasks=[("u", ["b"])], parent=trunk, seed=9)
    limits = ResidentLimits(spare=9, max_bytes=bytes_of([trunk, *others[:2]]))
    residents = Residents(engine, batcher=batcher, limits=limits, clock=clock)
    residents.serve(residents.load(trunk, shards=store))
    for manifest in others:
        residents.load(manifest, shards=store)
    assert engine.kept == [1, 3, 4]
    assert residents.bytes <= bytes_of([trunk, *others[:2]])

    tight = ResidentLimits(spare=9, max_bytes=bytes_of([trunk]))
    residents = Residents(engine, batcher=batcher, limits=tight, clock=clock)
    residents.serve(residents.load(trunk, shards=store, needed=True))
    with pytest.raises(NoRoom, match="version 5 does not fit"):
        residents.load(child, shards=store)
    # What the channel names comes in, and the one before it leaves.
    residents.serve(residents.load(child, shards=store, needed=True))
    assert engine.kept == [5]


def test_who_has_to_leave_for_a_version_leaves_before_it_takes_memory(
    store: Store, batcher: ImageBatcher, clock: Clock
) -> None:
    at_fetch: list[list[int]] = []

    class Watching(FakeEngine):
        def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
            at_fetch.append([one.version for one in residents.manifests])
            return super().fetch(manifest, read=read)

    made = [publish_tiny(store, tasks=[("t", [f"c{i}"])], seed=i) for i in range(4)]
    for limits in (ResidentLimits(spare=1), ResidentLimits(spare=9, max_bytes=bytes_of(made[:2]))):
        at_fetch.clear()
        residents = Residents(Watching(), batcher=batcher, limits=limits, clock=clock)
        for manifest in made:
            residents.serve(residents.load(manifest, shards=store))
        assert at_fetch == [[], [1], [2], [3]]
        assert [one.version for one in residents.manifests] == [3, 4]


def test_experts_that_versions_share_count_once(store: Store) -> None:
    trunk = publish_tiny(store, tasks=[("t", ["a"])])
    child = publish_tiny(store, tasks=[("u", ["b"])], parent=trunk, seed=9)
    refs = {*trunk.model_shards, *child.model_shards}
    assert len(refs) == 4
    assert bytes_of([trunk, child]) == sum(ref.bytes for ref in refs)


def test_the_engine_answers_between_the_steps_of_a_load(
    store: Store, letters: Manifest, engine: FakeEngine, batcher: ImageBatcher
) -> None:
    residents = Residents(engine, batcher=batcher, limits=ResidentLimits())
    answered: list[bool] = []

    class Slow(FakeEngine):
        def load(self, fetched: Fetched) -> Steps[Resident]:
            for _ in range(3):
                query = Query(pixels=np.zeros((8, 8, 3), dtype=np.uint8), residents=(first,))
                [answer] = batcher.submit(first, items=[query])
                yield
                answered.append(answer.done())
            return (yield from super().load(fetched))

    first = residents.load(letters, shards=store)
    second = publish_tiny(store, tasks=[("digits", ["0"])], parent=letters)
    Residents(Slow(), batcher=batcher, limits=ResidentLimits()).load(second, shards=store)
    assert answered == [True, True, True]


# The same promises through a real server.


def test_a_flipped_bit_keeps_the_old_version_serving_and_says_so(
    live: Live, store: Store, digits: Manifest
) -> None:
    third = publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    flip_last_bit(store, third.tasks[-1].expert)
    promote(store, third)
    wait_for(lambda: live.http.get("/readyz").json()["error"] is not None)
    ready = live.http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["version"] == 2
    assert third.tasks[-1].expert.sha256 in ready.json()["error"]
    assert live.predict(png()).json()["version"] == 2
    assert live.metric("dne_failed_loads_total") >= 1
    assert live.metric("dne_following") == 0
    store.rollback(channel="production", to=1, actor="tests", reason="")
    live.wait_until_serving(1)
    assert live.http.get("/readyz").json()["error"] is None


def test_a_server_that_starts_with_a_broken_head_serves_the_version_before_and_says_so(
    store: Store, digits: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    third = publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    mend = break_expert(store, third)
    promote(store, third)
    with live_server(Path(store.location), guard="errors>1%") as live:
        live.wait_until_serving(2)
        ready = live.http.get("/readyz").json()
        assert (ready["fallback"], ready["head"], ready["record"]) == (True, 3, 2)
        assert third.tasks[-1].expert.sha256 in ready["error"]
        assert (live.metric("dne_fallback"), live.metric("dne_following")) == (1, 0)
        assert live.serving._guard._watch is None  # it was not promoted just now
        assert live.predict(png()).json()["version"] == 2
        mend()
        live.wait_until_serving(3)
        ready = live.http.get("/readyz").json()
        assert (ready["fallback"], ready["head"], ready["error"]) == (False, 3, None)
        assert (live.metric("dne_fallback"), live.metric("dne_following")) == (0, 1)
    assert "version 2 is served until the head can be" in caplog.text


def break_expert(store: Store, manifest: Manifest) -> Callable[[], None]:
    """Damages the newest expert; what it returns mends it."""
    ref = manifest.tasks[-1].expert
    path = Path(store.location, "shards", ref.sha256[:2], f"{ref.sha256}.safetensors")
    whole = path.read_bytes()
    flip_last_bit(store, ref)
    return lambda: void(path.write_bytes(whole))


def void(_: object) -> None: ...


def test_loading_the_next_version_reads_only_the_delta(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read_shard = Store.read_shard

    def counted(self: Store, ref: ShardRef) -> bytes:
        reads.append(ref.sha256)
        return read_shard(self, ref)

    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        second = publish_tiny(store, tasks=[("digits", ["0", "1"])], parent=letters, seed=1)
        monkeypatch.setattr(Store, "read_shard", counted)
        promote(store, second)
        live.wait_until_serving(2)
        assert sorted(reads) == sorted([second.tasks[1].expert.sha256, second.classifier.sha256])
        reads.clear()
        assert live.predict(png(), query="?version=1").status_code == 200
        assert reads == []


def test_a_request_keeps_the_version_it_began_with(live: Live) -> None:
    """The first half of the body comes before the rollback, the second half after it."""
    half_sent, moved = threading.Event(), threading.Event()
    image = png(3)

    def body() -> Iterator[bytes]:
        yield image[:20]
        half_sent.set()
        moved.wait(20)
        yield image[20:]

    answers = []

    def ask() -> None:
        headers = {"Content-Type": "image/png"}
        answers.append(live.http.post("/predict", content=body(), headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    half_sent.wait(20)
    wait_for(lambda: live.metric("dne_requests_under_way") == 2)  # it, and the question itself
    assert live.admin("/rollback", to=1).status_code == 200
    moved.set()
    asking.join()
    assert answers[0].json()["version"] == 2
    assert live.predict(png(3)).json()["version"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_that_loads_gives_way_to_those_that_answer(live: Live) -> None:
    by_name = {thread.name: thread for thread in threading.enumerate()}
    niceness = {
        name: os.getpriority(os.PRIO_PROCESS, by_name[name].native_id or 0)
        for name in ("reloader", "engine")
    }
    assert niceness["reloader"] == niceness["engine"] + NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_where_priorities_are_forbidden_versions_are_served_all_the_same(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        assert live.predict(png()).status_code == 200
