"""The table of `make test-faults`: one row a campaign, written by the campaign itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FaultRow = Callable[[str, str, str], None]
"""`fault_row(name, how, result)`: what was done to the store, how, and what came of it."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    how: str
    result: str
    seconds: float


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


_ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture
def fault_row(request: pytest.FixtureRequest) -> FaultRow:
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
    if not rows:
        return
    terminalreporter.section("faults")
    for line in table(rows):
        terminalreporter.write_line(line)


def table(rows: list[Row], *, kind: str = "fault") -> list[str]:
    """The rows as a table that reads as text and as Markdown."""
    cells = [
        (kind, "how", "result", "s"),
        *((row.name, row.how, row.result, f"{row.seconds:.0f}") for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    head, *body = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    rule = " | ".join("-" * width for width in widths)
    return [f"| {line} |" for line in (head, rule, *body)]
