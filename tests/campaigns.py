"""The tables of `make test-faults`, `test-abuse` and `test-scale`: a row a campaign."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

AddRow = Callable[[str, str, str], None]
"""`add(name, how, result)`: what was done, how, and what came of it."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    how: str
    result: str
    seconds: float


class Campaigns:
    """The rows of one kind. They are kept with the run, and shown at its end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._key = pytest.StashKey[list[Row]]()

    def row(self, config: pytest.Config) -> AddRow:
        """To be called last: a campaign that fails has no result to show."""
        began_s = time.monotonic()
        rows = config.stash.setdefault(self._key, [])

        def add(name: str, how: str, result: str) -> None:
            rows.append(Row(name, how, result, time.monotonic() - began_s))

        return add

    def show(self, reporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        rows = config.stash.get(self._key, [])
        if rows:
            reporter.section(self._kind)
            for line in self._table(rows):
                reporter.write_line(line)

    def _table(self, rows: list[Row]) -> list[str]:
        """The rows as a table that reads as text and as Markdown."""
        cells = [
            (self._kind, "how", "result", "s"),
            *((row.name, row.how, row.result, f"{row.seconds:.0f}") for row in rows),
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        head, *body = (
            " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in cells
        )
        rule = " | ".join("-" * width for width in widths)
        return [f"| {line} |" for line in (head, rule, *body)]
