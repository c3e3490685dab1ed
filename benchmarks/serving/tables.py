"""The README's comparison of servers, made from the benchmark's result.

python -m benchmarks.serving.tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
KEY = re.compile(r"requests/s, (?P<name>.+), (?P<connections>\d+) connections")
HEAD = (
    "| server | requests/s at 1 / 8 / 32 connections | p50, p99 at 32 (ms) | failed |",
    "|---|---|---|---|",
)


def comparison(result: dict[str, Any]) -> str:
    """A row for every server, the fastest at 32 connections first."""
    measured: dict[str, float] = result["measured"]
    names = list(dict.fromkeys(found["name"] for found in map(KEY.fullmatch, measured) if found))

    def of(what: str, name: str, connections: int) -> float:
        return measured[f"{what}, {name}, {connections} connections"]

    rows = []
    for name in sorted(names, key=lambda one: -of("requests/s", one, 32)):
        rates = " / ".join(f"{of('requests/s', name, count):.0f}" for count in (1, 8, 32))
        times = f"{of('p50 ms', name, 32):.0f}, {of('p99 ms', name, 32):.0f}"
        failed = sum(of("failed", name, count) for count in (1, 8, 32))
        shown = f"**{name}**" if name.startswith("dne-serve") else name
        rows.append(f"| {shown} | {rates} | {times} | {failed:.0f} |")
    return "\n".join((*HEAD, *rows))


if __name__ == "__main__":
    print(comparison(json.loads((RESULTS / "serving.json").read_text())))
