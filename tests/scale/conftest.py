"""The table of `make test-scale`: one row a figure."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns import AddRow, Campaigns
from tests.many_versions import write_versions

SCALE = Campaigns("scale")
VERSIONS = 10_000


@pytest.fixture(scope="session")
def large_store() -> Iterator[Path]:
    """Ten thousand versions of ten tasks, and as many channel records."""
    folder = Path(tempfile.mkdtemp(prefix="dne-scale-"))
    try:
        write_versions(folder / "models", count=VERSIONS, tasks=10)
        yield folder / "models"
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def scale_row(request: pytest.FixtureRequest) -> AddRow:
    """Adds a row to the table."""
    return SCALE.row(request.config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    SCALE.show(terminalreporter, config)
