from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dne_serve.rollout.loaded_versions import EngineRoom, ImageBatcher, LoadedLimits, LoadedVersions
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock, FakeEngine
from tests.live_server import Live, live_server
from tests.tiny_versions import promote, publish_tiny


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    """A developer's own DNE_ variables must not reach the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DNE_")]:
            patch.delenv(name)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "models"))


@pytest.fixture
def letters(store: Store) -> Manifest:
    """Version 1, promoted: a, b."""
    return publish_letters(store)


@pytest.fixture
def digits(store: Store, letters: Manifest) -> Manifest:
    """Version 2, promoted: a, b, 0, 1, 2."""
    return publish_digits(store, letters)


@pytest.fixture
def live(store: Store, digits: Manifest) -> Iterator[Live]:
    """Serves version 2, to one test: it may move the channel."""
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serves version 2, to all tests of a file: none of them may change its store."""
    store = Store.create(str(tmp_path_factory.mktemp("steady") / "models"))
    publish_digits(store, publish_letters(store))
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live


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
def loaded(engine: FakeEngine, batcher: ImageBatcher, clock: Clock) -> LoadedVersions:
    return LoadedVersions(
        EngineRoom(engine, batcher=batcher), limits=LoadedLimits(spare=2, idle_s=60), clock=clock
    )


def publish_letters(store: Store) -> Manifest:
    return promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])]))


def publish_digits(store: Store, parent: Manifest) -> Manifest:
    tasks = [("digits", ["0", "1", "2"])]
    return promote(store, publish_tiny(store, tasks=tasks, parent=parent, seed=1, accuracy=0.9))
