from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.manifest import Manifest
from model_store.store import Store
from tests.live_server import Live, live_server
from tests.tiny_versions import promote, publish_tiny


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own DNE_ variables must not reach the tests."""
    for name in [name for name in os.environ if name.startswith("DNE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "models"))


@pytest.fixture
def letters(store: Store) -> Manifest:
    """Version 1, promoted: a, b."""
    return promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])]))


@pytest.fixture
def digits(store: Store, letters: Manifest) -> Manifest:
    """Version 2, promoted: a, b, 0, 1, 2."""
    tasks = [("digits", ["0", "1", "2"])]
    return promote(store, publish_tiny(store, tasks=tasks, parent=letters, seed=1, accuracy=0.9))


@pytest.fixture
def live(store: Store, digits: Manifest) -> Iterator[Live]:
    """Serves version 2."""
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live
