"""A store that vanishes or is replaced under a running server is told, and never followed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from dne_serve.errors import StoreChanged
from dne_serve.rollout.channel import SameStore
from dne_serve.rollout.loaded_versions import EngineRoom, ImageBatcher, LoadedLimits, LoadedVersions
from dne_serve.rollout.reloader import NEXT_POLLS, Reloader
from model_store.backends.base import Objects
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.dne_serve.fake_engine import FakeEngine
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.model_store.backends import MemoryObjects
from tests.tiny_versions import promote, publish_tiny


def wait_until_told(live: Live, says: str) -> None:
    wait_for(lambda: says in (live.http.get("/readyz").json()["error"] or ""))


def assert_still_serving(live: Live, version: int) -> None:
    ready = live.http.get("/readyz")
    assert (ready.status_code, ready.json()["version"]) == (200, version)
    assert live.predict(png()).json()["version"] == version
    assert live.metric("dne_following") == 0


def test_a_store_that_vanishes_is_told_everywhere_and_its_version_stays(
    live: Live, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(store.location)
    with caplog.at_level(logging.WARNING, logger="dne_serve.reloader"):
        root.rename(root.with_name("unmounted"))
        wait_until_told(live, "the store has vanished")
        assert_still_serving(live, 2)
        assert_problem(live.http.get("/versions"), 503, says="the store has vanished")
        assert_problem(live.http.get("/versions/1"), 503, says="the store has vanished")
        assert_problem(live.admin("/rollback", to=1), 503, says="the store has vanished")
        assert not root.exists()  # nobody has begun another one there
        root.with_name("unmounted").rename(root)
        wait_for(lambda: live.http.get("/readyz").json()["error"] is None)
    assert sum("vanished" in line.getMessage() for line in caplog.records) == 1
    assert live.metric("dne_following") == 1
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], seed=4))
    live.wait_until_serving(3)


def test_another_store_in_its_place_is_not_followed(live: Live, store: Store) -> None:
    root = Path(store.location)
    root.rename(root.with_name("first"))
    other = Store.create(str(root))
    for seed in range(3):
        promote(other, publish_tiny(other, tasks=[("t", [f"other{seed}"])], seed=seed))
    wait_until_told(live, "another store")
    assert_still_serving(live, 2)
    assert_problem(live.http.get("/versions"), 503, says="another store")
    assert_problem(live.admin("/promote", to=1), 503, says="another store")
    assert len(other.history("production")) == 3
    shutil.rmtree(root)
    root.with_name("first").rename(root)
    wait_for(lambda: live.http.get("/readyz").json()["error"] is None)
    assert live.metric("dne_following") == 1


def test_records_that_are_gone_are_told_and_the_version_stays(live: Live, store: Store) -> None:
    records = Path(store.location, "channels", "production")
    newest = records / "00000002.json"
    newest.rename(records.with_name("kept.json"))
    wait_until_told(live, "went back to record 1, and record 2 was seen")
    assert_still_serving(live, 2)
    (records / "00000001.json").rename(records.with_name("kept-too.json"))
    wait_until_told(live, "has no record any more, and record 2 was seen")
    assert_still_serving(live, 2)
    records.with_name("kept-too.json").rename(records / "00000001.json")
    records.with_name("kept.json").rename(newest)
    wait_for(lambda: live.http.get("/readyz").json()["error"] is None)


def test_a_channel_that_went_back_is_followed_again_when_it_is_moved_through_the_server(
    live: Live, store: Store
) -> None:
    Path(store.location, "channels", "production", "00000002.json").unlink()
    wait_until_told(live, "went back")
    assert live.admin("/promote", to=1).json()["version"] == 1
    assert live.http.get("/readyz").json()["error"] is None


def memory_store(objects: Objects) -> Manifest:
    store = Store.create("memory", objects=objects)
    return publish_digits(store, publish_letters(store))


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    """A bucket in memory, which is what any location means."""
    objects = MemoryObjects()
    monkeypatch.setattr("model_store.store.store.objects_at", lambda location: objects)
    return objects


def test_a_bucket_that_was_emptied_or_filled_anew_is_told(objects: MemoryObjects) -> None:
    memory_store(objects)
    engine = FakeEngine()
    batcher = ImageBatcher(engine.run, max_batch=4, max_queue=8)
    batcher.start()
    loaded = LoadedVersions(EngineRoom(engine, batcher=batcher), limits=LoadedLimits())
    open_store = SameStore("memory")
    reloader = Reloader(open_store, loaded=loaded, channel="production", poll_s=1.0)

    def seen() -> tuple[int, str]:
        for _ in range(NEXT_POLLS + 1):  # the last of them looks at the whole channel
            reloader.poll()
        failure = str(reloader.failure.error) if reloader.failure else ""
        return loaded.served.version if loaded.served else 0, failure

    try:
        assert seen() == (2, "")
        kept = dict(objects.held)
        objects.held.clear()
        assert seen()[0] == 2
        assert "the store has vanished" in seen()[1]
        memory_store(objects)
        assert "another store" in seen()[1]
        with pytest.raises(StoreChanged):
            open_store()
        objects.held = kept
        assert seen() == (2, "")
    finally:
        batcher.stop()


def test_a_store_that_is_absent_at_first_is_opened_when_it_comes(tmp_path: Path) -> None:
    with live_server(tmp_path / "later") as live:
        assert_problem(live.http.get("/readyz"), 503, says="no store yet")
        store = Store.create(str(tmp_path / "later"))
        publish_letters(store)
        live.wait_until_serving(1)
