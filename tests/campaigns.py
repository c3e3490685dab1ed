"""Tables of the suites faults, abuse and scale: one row a campaign."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

AddRow = Callable[[str, str, str], None]
"""`add(name, how, result)`: the name of a campaign, its method, and its result."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    how: str
    result: str
    seconds: float


_ROWS = pytest.StashKey[dict[str, list[Row]]]()


def campaign(kind: str) -> Callable[[pytest.FixtureRequest], AddRow]:
    """Make the fixture that adds a row to the table of one kind."""

    @pytest.fixture
    def row(request: pytest.FixtureRequest) -> AddRow:
        """Add a row, as the last step: a campaign that fails has no result to show."""
        began_s = time.monotonic()
        rows = request.config.stash.setdefault(_ROWS, {}).setdefault(kind, [])

        def add(name: str, how: str, result: str) -> None:
            rows.append(Row(name, how, result, time.monotonic() - began_s))

        return add

    return row


def show_campaigns(reporter: pytest.TerminalReporter) -> None:
    """Show the table of each kind that has rows."""
    for kind, rows in reporter.config.stash.get(_ROWS, {}).items():
        reporter.section(kind)
        for line in _table(kind, rows):
            reporter.write_line(line)


def _table(kind: str, rows: list[Row]) -> list[str]:
    """Lay out the rows as a table that reads as text and as Markdown."""
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
