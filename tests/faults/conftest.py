"""The table of `make test-faults`: one row a campaign, written by the campaign itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns import AddRow, Campaigns

FAULTS = Campaigns("fault")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: for what a kill leaves the disk is of no account,
    and thousands of fsyncs are."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="dne-faults-") as folder:
        yield Path(folder)


@pytest.fixture
def fault_row(request: pytest.FixtureRequest) -> AddRow:
    """Adds a row to the table."""
    return FAULTS.row(request.config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    FAULTS.show(terminalreporter, config)
