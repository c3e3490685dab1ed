"""The README's comparisons of servers, made from the benchmarks' results.

python -m benchmarks.serving.tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
KEY = re.compile(r"requests/s, (?P<name>.+), (?P<connections>\d+) connections")
PHOTO = re.compile(
    r"requests/s, (?P<backbone>.+), (?P<size>[\d.]+ megapixels), (?P<name>.+), "
    r"(?P<connections>\d+) connections"
)
HEAD = (
    "| server | requests/s at 1 / 8 / 32 connections | p50, p99 at 32 (ms) | failed |",
    "|---|---|---|---|",
)
PHOTO_HEAD = (
    "| network, server | requests/s at 1 / 8 / 32 connections | processor time of a request (ms) "
    "| 12 megapixels: requests/s, ms | failed |",
    "|---|---|---|---|---|",
)
SMALL, LARGE = "0.3 megapixels", "12 megapixels"


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
        rows.append(f"| {_shown(name)} | {rates} | {times} | {failed:.0f} |")
    return "\n".join((*HEAD, *rows))


def photos(result: dict[str, Any]) -> str:
    """A row for every network and server, the least processor time first."""
    measured: dict[str, float] = result["measured"]
    keys = [found for found in map(PHOTO.fullmatch, measured) if found]
    pairs = list(dict.fromkeys((found["backbone"], found["name"]) for found in keys))

    def of(what: str, pair: tuple[str, str], connections: int, size: str = SMALL) -> float:
        backbone, name = pair
        return measured[f"{what}, {backbone}, {size}, {name}, {connections} connections"]

    rows = []
    backbones = [backbone for backbone, _ in pairs]
    for pair in sorted(
        pairs, key=lambda one: (backbones.index(one[0]), of("processor ms", one, 8))
    ):
        rates = " / ".join(f"{of('requests/s', pair, count):.1f}" for count in (1, 8, 32))
        large = f"{of('requests/s', pair, 8, LARGE):.1f}, {of('processor ms', pair, 8, LARGE):.0f}"
        failed = sum(of("failed", pair, count) for count in (1, 8, 32)) + of(
            "failed", pair, 8, LARGE
        )
        rows.append(
            f"| {pair[0]}, {_shown(pair[1])} | {rates} | {of('processor ms', pair, 8):.0f} "
            f"| {large} | {failed:.0f} |"
        )
    return "\n".join((*PHOTO_HEAD, *rows))


def _shown(name: str) -> str:
    return f"**{name}**" if name.startswith("dne-serve") else name


if __name__ == "__main__":
    for table, name in ((photos, "photos.json"), (comparison, "serving.json")):
        if (RESULTS / name).exists():
            print(table(json.loads((RESULTS / name).read_text())), end="\n\n")
