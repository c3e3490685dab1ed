"""A server to be abused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.abuse.victim import Victim, serving
from tests.campaigns import campaign
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import TOKEN

abuse_row = campaign("abuse")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two versions; the second is served."""
    store = Store.create(str(tmp_path_factory.mktemp("abuse") / "models"))
    publish_digits(store, publish_letters(store))
    return Path(store.location)


@pytest.fixture(scope="session")
def victim(models: Path) -> Iterator[Victim]:
    """`dne-serve` with its defaults, in a process of its own that all tests must leave alive."""
    admin = {"DNE_ADMIN_TOKEN": TOKEN}
    with serving("--store", str(models), environment=admin) as victim:
        yield victim
        assert victim.is_alive()
