"""Write plain text for people: aligned columns, sizes, shares, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TextIO

from model_store.names import JOINERS

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FORMULAS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
"""Characters that begin a formula, also in the full width of East Asian scripts."""
_CONTROLS = frozenset("\t\r\n")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as lines, each column as wide as its widest cell."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def size(count: int) -> str:
    """Write a number of bytes in the unit that fits it."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def percent(share: float | None) -> str:
    """Write a share in per cent, and "-" where there is none.

    Halves are rounded up, as browsers do. Only a share of exactly 0 or 1 is written as 0 % or
    100 %: 1,999 right answers of 2,000 are 99.9 %.
    """
    if share is None:
        return "-"
    tenths = math.floor(share * 1000 + 0.5)
    if 0 < share < 1:
        tenths = min(max(tenths, 1), 999)
    return f"{tenths // 10}.{tenths % 10} %"


def figure(value: float, *, digits: int = 3) -> str:
    """Write a measured number with so many digits, and never with an exponent."""
    if 0 < abs(value) < 0.001:
        return "under 0.001"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    shown = f"{round(value, decimals):.{max(decimals, 0)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def likely_range(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was measured on `count` things."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    spread /= 1 + z * z / count
    return max(0.0, middle - spread), min(1.0, middle + spread)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Write a number and its noun: 1 task, 2 tasks."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


class Shown:
    """A stream of text to a terminal. Names come from stores and servers of strangers, so nothing
    but line ends and printable characters passes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        shown = text if text.isprintable() else "\n".join(map(printable, text.split("\n")))
        self._stream.write(shown)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def csv_cell(text: str) -> str:
    """Write a text for CSV, so that it is a text for spreadsheets too and never a formula: one that
    begins as a formula does gets an apostrophe."""
    shown = printable(text)
    return f"'{shown}" if text[:1] in _CONTROLS or text.lstrip()[:1] in _FORMULAS else shown


def printable(text: str) -> str:
    """Replace characters that could move the cursor, colour the terminal or turn the line round."""
    if text.isprintable():
        return text
    shown = (char if char.isprintable() or char in JOINERS else REPLACEMENT for char in text)
    return "".join(shown)
