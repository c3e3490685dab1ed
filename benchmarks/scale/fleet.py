"""Simulate 1,000 replicas on one bucket: requests and their price, and the time until all switch.

The requests are counted by the server's own code, the bytes are those of versions that the trainer
made, and the time to load them is measured here. Everything else is an assumption and an option.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.figures import Figure, at_most, print_figures
from benchmarks.scale.fleet_requests import Episodes, Requests, copy_of, count_requests
from benchmarks.scale.fleet_simulation import Assumptions, Fleet, Outcome, Source
from dne_serve.rollout.reloader import NEXT_POLLS

MONTH_S = 365.25 / 12 * 86_400
QUIET_S = 10
PUBLISHED = (0, 3)
"""Exit codes of `dne-train` with a version: promoted or not, its bytes are the same."""
LONG_HISTORY = 10_000
LARGE_DELTA_BYTES = 100_000_000
POLLS_S = (0.25, 1.0, 5.0, 30.0)
SOURCES: tuple[Source, ...] = ("bucket", "cache", "neighbour")

Row = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars for 1,000 requests, and for a gigabyte that leaves the bucket."""

    get: float = 0.0004
    list: float = 0.005
    gigabyte: float = 0.0

    def month(self, *, gets_per_s: float, lists_per_s: float) -> float:
        return MONTH_S * (gets_per_s * self.get + lists_per_s * self.list) / 1000

    def of(self, requests: Requests, *, replicas: int) -> float:
        """Dollars when each replica sends these requests once."""
        gets = sum(one.verb == "get" for one in requests)
        counted = gets * self.get + (len(requests) - gets) * self.list
        sent = sum(one.bytes for one in requests) / 1e9 * self.gigabyte
        return replicas * (counted / 1000 + sent)


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = Path(options.store) if options.store else train(Path(folder))
        known = partial(count_requests, older=options.older, newer=options.newer)
        episodes = known(copy_of(location))
        aged = known(copy_of(location), records=LONG_HISTORY)
    assumed = Assumptions(**{one.name: getattr(options, one.name) for one in fields(Assumptions)})
    prices = Prices(get=options.get_price, list=options.list_price, gigabyte=options.gb_price)
    tables = simulate(episodes, assumed, prices=prices)
    measured = {
        **constants(episodes, assumed, prices=prices),
        **{
            f"{table}, {name}: {what}": value
            for table, rows in tables.items()
            for name, row in rows.items()
            for what, value in row.items()
        },
    }
    if not options.json:
        print("\n\n".join(markdown(title, rows) for title, rows in tables.items()), end="\n\n")
    figures = judge(tables, episodes, aged, replicas=assumed.replicas)
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--store", help="a store made by dne-train; trains two tasks by default")
    parser.add_argument("--older", type=int, default=1, help="the version before the release")
    parser.add_argument("--newer", type=int, default=2, help="its child, which is released")
    for one in fields(Assumptions):
        name = f"--{one.name.replace('_', '-')}"
        choices = SOURCES if one.name == "source" else None
        parser.add_argument(name, type=type(one.default), default=one.default, choices=choices)
    prices = Prices()
    parser.add_argument("--get-price", type=float, default=prices.get, help="$ for 1,000 GETs")
    parser.add_argument("--list-price", type=float, default=prices.list, help="$ for 1,000 LISTs")
    parser.add_argument("--gb-price", type=float, default=prices.gigabyte, help="$ for a gigabyte")
    return parser


def train(folder: Path) -> Path:
    """Make two versions of the preset `small` by `dne-train`. Their size does not depend on the
    images, so one epoch on a few coloured squares is enough."""
    chance = np.random.default_rng(0)
    for task in ("first", "second"):
        for number in range(10):
            images = folder / task / f"{task} {number}"
            images.mkdir(parents=True)
            squares = np.kron(chance.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1)))
            for image in range(20):
                noisy = (squares + chance.normal(0, 20, squares.shape)).clip(0, 255)
                Image.fromarray(noisy.astype(np.uint8)).save(images / f"{image}.png")
        command = [str(Path(sys.executable).parent / "dne-train"), "add-task", "--epochs", "1"]
        where = ["--data", str(folder / task), "--store", str(folder / "models")]
        if subprocess.run([*command, *where], stderr=sys.stderr).returncode not in PUBLISHED:
            sys.exit(f"the task {task} could not be learnt")
    return folder / "models"


def simulate(
    episodes: Episodes, assumed: Assumptions, *, prices: Prices
) -> dict[str, dict[str, Row]]:
    """Simulate everything that the tables show."""
    run = partial(change, prices=prices)
    sizes = {"measured delta": episodes, "delta of 100 MB": resized(episodes, LARGE_DELTA_BYTES)}
    calm = replace(assumed, poll_s=1.0)
    ways: dict[str, Assumptions] = {name: replace(calm, source=name) for name in SOURCES}
    ways["jitter of 5 s"] = replace(calm, fetch_jitter_s=5.0)
    return {
        "polls": {
            f"{poll_s:g} s": run(episodes, replace(assumed, poll_s=poll_s)) for poll_s in POLLS_S
        },
        "replicas at the default poll": {
            f"{count:,}": run(episodes, replace(assumed, replicas=count))
            for count in (100, 1000, 1300, 2000)
        },
        "herd": {
            f"{size}, {way}": run(sized, ways[way]) for size, sized in sizes.items() for way in ways
        },
        "start of all at once": {way: start(episodes, ways[way]) for way in SOURCES},
        "sensitivity": {
            name: run(episodes, replace(calm, **changed)) for name, changed in SENSITIVITY.items()
        },
    }


SENSITIVITY: Mapping[str, Mapping[str, Any]] = {
    "as assumed": {},
    "latency 10 ms": {"latency_ms": 10.0},
    "latency 100 ms": {"latency_ms": 100.0},
    "bucket 125 MB/s": {"bucket_mb_per_s": 125.0},
    "bucket 12,500 MB/s": {"bucket_mb_per_s": 12_500.0},
    "replica 12.5 MB/s": {"replica_mb_per_s": 12.5},
    "bucket 1,000 requests/s": {"requests_per_s": 1000.0},
    "another seed": {"seed": 1},
}


@cache
def change(episodes: Episodes, assumed: Assumptions, *, prices: Prices) -> Row:
    """Simulate a quiet time, a release and a rollback. Equal simulations run once."""
    quiet_s = QUIET_S + 3 * math.ceil(assumed.poll_s)
    released_s = quiet_s + math.ceil(assumed.poll_s)
    herd_s = assumed.replicas * episodes.delta_bytes / (1e6 * assumed.bucket_mb_per_s)
    back_s = released_s + 5 + math.ceil(2 * assumed.poll_s + 1.2 * herd_s + assumed.fetch_jitter_s)
    found = Fleet(
        episodes,
        assumed,
        moves=[(released_s, "release"), (back_s, "rollback")],
        end_s=back_s + 5 + 2 * assumed.poll_s,
    ).run()
    begin_s = math.ceil(assumed.poll_s)
    gets, lists = (found.rate(verb, begin_s=begin_s, end_s=released_s) for verb in ("get", "list"))
    return {
        "requests/s": gets + lists,
        "$ a month": prices.month(gets_per_s=gets, lists_per_s=lists),
        "peak requests/s": found.peak(begin_s=released_s),
        "peak MB/s": found.peak_mb_per_s,
        "GB": found.bytes / 1e9,
        "all released s": max(found.switched_s[1]),
        "mixed s": spread(found.switched_s[1]),
        "all rolled back s": max(found.switched_s[2]),
        "mixed s, rollback": spread(found.switched_s[2]),
        "refused": found.refused,
        "failed polls": found.failed_polls,
        "late": 2 * assumed.replicas - len(found.switched_s[1]) - len(found.switched_s[2]),
    }


def start(episodes: Episodes, assumed: Assumptions) -> Row:
    """Simulate replicas that all start within a second, without a local cache."""
    found: Outcome = Fleet(episodes, assumed, moves=[], end_s=2.0, starts=True).run()
    return {
        "all serve s": max(found.switched_s[0]),
        "GB": found.bytes / 1e9,
        "peak MB/s": found.peak_mb_per_s,
        "peak requests/s": found.peak(),
        "refused": found.refused,
    }


def resized(episodes: Episodes, delta_bytes: int) -> Episodes:
    """Make the delta of a release larger; the largest shard takes the difference."""
    largest = max(episodes.release, key=lambda one: one.bytes)
    more = delta_bytes - episodes.delta_bytes
    release = tuple(
        replace(one, bytes=one.bytes + more) if one is largest else one for one in episodes.release
    )
    return replace(episodes, release=release, delta_bytes=delta_bytes)


def spread(times_s: Sequence[float]) -> float:
    return max(times_s) - min(times_s)


def a_poll(episodes: Episodes) -> float:
    """Count the requests of a poll while nothing changes, on average."""
    return (NEXT_POLLS * len(episodes.glance) + len(episodes.look)) / (NEXT_POLLS + 1)


def constants(episodes: Episodes, assumed: Assumptions, *, prices: Prices) -> dict[str, float]:
    """Tell what was measured, and the price of a release."""
    named = ("glance", "look", "start", "release", "rollback")
    return {
        **{f"requests of a {name}": len(getattr(episodes, name)) for name in named},
        "MB of the delta": episodes.delta_bytes / 1e6,
        "MB of the version": episodes.model_bytes / 1e6,
        "seconds to load the delta": episodes.load_s,
        "seconds to load the version": episodes.start_s,
        "$ of a release": prices.of(episodes.release, replicas=assumed.replicas),
        "$ of a rollback": prices.of(episodes.rollback, replicas=assumed.replicas),
    }


def judge(
    tables: Mapping[str, Mapping[str, Row]], episodes: Episodes, aged: Episodes, *, replicas: int
) -> list[Figure]:
    at_default = tables["polls"]["0.25 s"]
    every = [row for name in ("polls", "herd") for row in tables[name].values()]
    wanted = replicas * episodes.delta_bytes / 1e9
    return [
        at_most("requests of a poll while nothing changes", a_poll(episodes), 1.1),
        at_most(f"… with {LONG_HISTORY:,} records in the channel", a_poll(aged), 1.1),
        at_most("a release, all replicas switched, s", at_default["all released s"], 5),
        at_most("a rollback, all replicas switched, s", at_default["all rolled back s"], 1),
        at_most("bytes fetched ÷ replicas × delta", at_default["GB"] / wanted, 1.05),
        at_most("replicas that missed a move", sum(row["late"] for row in every), 0),
        at_most("requests refused by the bucket", at_default["refused"], 0),
    ]


def markdown(title: str, rows: Mapping[str, Row]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        values = (row[one] for one in columns)
        cells = (f"{one:,.0f}" if one >= 100 else f"{one:.3g}" for one in values)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
