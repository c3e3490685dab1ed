"""The server that is abused, and the table of `make test-abuse`: one row a campaign."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_store.store import Store
from tests.abuse.victim import Victim, serving
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.faults.conftest import Row, table
from tests.live_server import TOKEN

AbuseRow = Callable[[str, str, str], None]
"""`abuse_row(name, how, result)`: what was done to the server, how, and what came of it."""

_ROWS = pytest.StashKey[list[Row]]()


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


@pytest.fixture
def abuse_row(request: pytest.FixtureRequest) -> AbuseRow:
    """Adds a row to the table. Call it last: a campaign that fails has no result to show."""
    began_s = time.monotonic()
    rows = request.config.stash.setdefault(_ROWS, [])

    def add(name: str, how: str, result: str) -> None:
        rows.append(Row(name, how, result, time.monotonic() - began_s))

    return add


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("abuse")
        for line in table(rows, kind="abuse"):
            terminalreporter.write_line(line)
