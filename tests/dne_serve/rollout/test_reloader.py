from __future__ import annotations

from pathlib import Path

import pytest

from dne_serve.rollout.channel import MAX_FALLBACKS
from dne_serve.rollout.loaded_versions import LoadedVersions
from dne_serve.rollout.reloader import Reloader
from model_store.errors import ShardCorrupt, StoreNotFound
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock, FakeEngine
from tests.tiny_versions import promote, publish_tiny


@pytest.fixture
def reloader(store: Store, loaded: LoadedVersions, clock: Clock) -> Reloader:
    return Reloader(lambda: store, loaded=loaded, channel="production", poll_s=1.0, clock=clock)


def served(loaded: LoadedVersions) -> int | None:
    return loaded.served.version if loaded.served else None


def test_it_serves_what_the_channel_names(
    store: Store, letters: Manifest, reloader: Reloader, loaded: LoadedVersions
) -> None:
    reloader.poll()
    assert served(loaded) == 1
    promote(store, publish_tiny(store, tasks=[("digits", ["0"])], parent=letters))
    assert served(loaded) == 1
    reloader.poll()
    assert served(loaded) == 2
    assert reloader.record == store.head("production")


def test_what_is_withdrawn_stays_away_until_it_is_followed_again(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    engine: FakeEngine,
    loaded: LoadedVersions,
) -> None:
    reloader.poll()
    engine.kept = [2]
    reloader.withdraw()
    assert (served(loaded), loaded.count, engine.kept) == (None, 0, [])
    store.rollback(channel="production", to=1, actor="tests", reason="")
    reloader.poll()
    assert served(loaded) is None
    reloader.follow()
    assert served(loaded) == 1
    store.resume(channel="production", actor="tests", reason="")
    reloader.poll()
    assert served(loaded) == 2


def test_another_channel_does_not_move_it(
    store: Store, letters: Manifest, reloader: Reloader, loaded: LoadedVersions
) -> None:
    reloader.poll()
    canary = publish_tiny(store, tasks=[("digits", ["0"])], parent=letters)
    promote(store, canary, channel="canary")
    reloader.poll()
    assert served(loaded) == 1


def test_going_back_to_a_resident_version_loads_nothing(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    engine: FakeEngine,
    loaded: LoadedVersions,
) -> None:
    reloader.poll()
    for to in (1, 2, 1, 2):
        store.promote(to, channel="production", actor="tests", reason="")
        reloader.poll()
        assert served(loaded) == to
    assert engine.loaded == [2, 1]


def test_a_failed_load_keeps_the_old_version_and_is_tried_again_with_backoff(
    store: Store,
    letters: Manifest,
    reloader: Reloader,
    loaded: LoadedVersions,
    engine: FakeEngine,
    clock: Clock,
) -> None:
    reloader.poll()
    engine.broken.add(2)
    promote(store, publish_tiny(store, tasks=[("digits", ["0"])], parent=letters))
    waits = []
    for times in range(1, 9):
        reloader.poll()
        assert served(loaded) == 1
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
    assert served(loaded) == 2
    assert reloader.failure is None


def test_a_new_head_is_tried_at_once_after_a_failure(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    loaded: LoadedVersions,
    engine: FakeEngine,
) -> None:
    engine.broken |= {1, 2}
    reloader.poll()
    assert served(loaded) is None
    engine.broken.remove(1)
    store.rollback(channel="production", to=1, actor="tests", reason="")
    reloader.poll()
    assert served(loaded) == 1
    assert (reloader.failure, reloader.fallback) == (None, False)


def test_at_the_start_an_earlier_version_stands_in_for_a_head_that_cannot_be_loaded(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    loaded: LoadedVersions,
    engine: FakeEngine,
    clock: Clock,
) -> None:
    for seed in (3, 4):
        promote(store, publish_tiny(store, tasks=[("t", [f"c{seed}"])], seed=seed))
    promote(store, digits)  # 1, 2, 3, 4, 2
    engine.broken |= {2, 4}
    reloader.poll()
    assert served(loaded) == 3
    assert reloader.fallback
    assert reloader.failure is not None
    assert reloader.failure.record == reloader.head == store.head("production")
    assert reloader.record == store.record("production", 3)
    reloader.poll()
    assert engine.loaded == [3]  # it is served, and the head is not tried before its time
    engine.broken.clear()
    clock.now = reloader.failure.retry_at
    reloader.poll()
    assert served(loaded) == 2
    assert (reloader.failure, reloader.fallback) == (None, False)


def test_a_version_that_was_served_is_not_replaced_by_an_earlier_one(
    store: Store,
    digits: Manifest,
    reloader: Reloader,
    loaded: LoadedVersions,
    engine: FakeEngine,
) -> None:
    reloader.poll()
    engine.broken.add(3)
    promote(store, publish_tiny(store, tasks=[("t", ["c"])], seed=3))
    reloader.poll()
    assert (served(loaded), reloader.fallback) == (2, False)


def test_an_unreadable_head_record_is_passed_over_at_the_start(
    store: Store, digits: Manifest, reloader: Reloader, loaded: LoadedVersions, clock: Clock
) -> None:
    junk = Path(store.location, "channels", "production", "99999999.json")
    junk.write_bytes(b"junk")
    reloader.poll()
    assert (served(loaded), reloader.fallback) == (2, True)
    assert "99999999.json cannot be trusted" in str(reloader.failure and reloader.failure.error)
    junk.unlink()
    reloader.poll()
    assert (served(loaded), reloader.fallback, reloader.failure) == (2, False, None)


def test_the_way_back_is_bounded(
    store: Store, reloader: Reloader, loaded: LoadedVersions, engine: FakeEngine, clock: Clock
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
    assert served(loaded) is None
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


def test_a_store_that_is_absent_is_waited_for(loaded: LoadedVersions) -> None:
    def absent() -> Store:
        raise StoreNotFound("there is no store at nowhere")

    reloader = Reloader(absent, loaded=loaded, channel="production", poll_s=0.01)
    reloader.start()
    reloader.stop()
    assert reloader.failure is not None
    assert isinstance(reloader.failure.error, StoreNotFound)
