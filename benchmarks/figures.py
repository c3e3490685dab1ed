"""What every benchmark ends with: figures, what was asked of each, and the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """`asked` in words, such as `at most 1.5`."""

    name: str
    value: float
    asked: str
    reached: bool


def at_most(name: str, value: float, limit: float) -> Figure:
    return Figure(name, round(value, 3), f"at most {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float) -> Figure:
    return Figure(name, round(value, 3), f"at least {limit:g}", value >= limit)


def machine() -> dict[str, object]:
    """What the figures depend on, and nothing that tells whose machine it is."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def print_figures(figures: list[Figure], *, measured: Mapping[str, float], as_json: bool) -> None:
    """A table; with `as_json` one object on the last line. `measured`: what the figures are of."""
    if as_json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "figures": [asdict(figure) for figure in figures],
                    "measured": {name: round(value, 3) for name, value in measured.items()},
                }
            )
        )
        return
    for figure in figures:
        mark = "reached" if figure.reached else "MISSED"
        print(f"{figure.name}: {figure.value:g} (asked: {figure.asked}) {mark}")
    for name, value in measured.items():
        print(f"  {name}: {value:.3f}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
