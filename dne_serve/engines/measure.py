"""Measure the candidates for an engine, in a process of its own that may die of it.

`python -m dne_serve.engines.measure MEASUREMENT` loads the served version by every candidate, lets
them take turns, and prints a line of JSON before every run and after every load. It gives way to
the server, and figures of a moment when other programs wanted the processor are marked.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from dne_serve.engines.base import Engine, Query, Resident, finish
from dne_serve.engines.candidates import Measurement, Request
from dne_serve.engines.choose import make_candidate
from model_store.store.store import Store

LOADS = (8, 1, 32)
"""Images under way, the most telling number first."""
LOST = 0.6
"""Share of the best candidate's speed over the loads so far, below which one is not run again."""
REPEATED_BELOW_S = (0.4, 0.1)
"""Seconds below which a run is repeated, once and once more: there are a few for all candidates."""
ROUNDS = 2
"""Undisturbed turns of every load that are enough."""
BUSY_S = 90.0
"""Seconds after which a machine that stays busy is left alone."""
QUIET = 0.85
"""Share of the processor that undisturbed threads get."""
PROBE = bytes(4 << 20)
"""Some milliseconds of work, for as many threads as the engine has."""

Best = dict[str, dict[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A candidate with the version in memory."""

    engine: Engine
    resident: Resident


def main(told: str) -> None:
    asked = Measurement.model_validate_json(told)
    os.nice(asked.niceness)
    with ThreadPoolExecutor(max_workers=asked.request.threads) as pool:
        ways = load_all(asked)
        torch.set_num_threads(asked.request.threads)  # building sets it for this thread
        Turns(ways, request=asked.request, pool=pool).run()


def load_all(asked: Measurement) -> dict[str, Way]:
    """Load the version by every candidate, as the server does."""
    store = Store.open(asked.store)
    manifest = store.read_manifest(asked.version)
    if manifest.digest != asked.digest:
        raise SystemExit(f"version {asked.version} is not the one that is served")
    ways = {}
    for one in asked.request.candidates:
        if one.name not in asked.excluded:
            say(trying=one.name)
            engine = make_candidate(
                one, threads=asked.request.threads, max_batch=asked.request.max_batch
            )
            fetched = engine.fetch(manifest, read=store.read_shard)
            ways[one.name] = Way(engine=engine, resident=finish(engine.load(fetched)))
    return ways


@dataclass(slots=True, kw_only=True)
class Figures:
    """The most images a second of each candidate, in undisturbed turns and in all of them."""

    quiet: Best = field(default_factory=dict)
    all: Best = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=lambda: dict.fromkeys(LOADS, 0))
    """Undisturbed turns by load."""

    @property
    def enough(self) -> bool:
        return min(self.turns.values()) >= ROUNDS

    def add(self, load: int, found: Mapping[str, float], *, quiet: bool) -> None:
        self.turns[load] += quiet
        for best in (self.all, self.quiet) if quiet else (self.all,):
            for name, rate in found.items():
                rates = best.setdefault(name, {})
                rates[load] = max(rate, rates.get(load, 0.0))

    def told(self) -> dict[str, object]:
        """Give the undisturbed figures once there are some of each load, and all before."""
        is_quiet = min(self.turns.values()) > 0
        best = self.quiet if is_quiet else self.all
        return {"quiet": is_quiet, "figures": {name: dict(one) for name, one in best.items()}}

    def running(self, names: list[str]) -> list[str]:
        """Leave out the candidates that have lost at the loads that all others were run at."""
        scores = {name: _mean(self.all.get(name, {})) for name in names}
        enough = LOST * max(scores.values())
        return [name for name, score in scores.items() if score >= enough]


def _mean(rates: Mapping[int, float]) -> float:
    return float(np.exp(np.mean(np.log(list(rates.values()))))) if rates else 0.0


class Turns:
    """Runs the candidates in turns, one load after the other."""

    def __init__(
        self, ways: Mapping[str, Way], *, request: Request, pool: ThreadPoolExecutor
    ) -> None:
        self._ways, self._request, self._pool = ways, request, pool

    def run(self) -> None:
        """Print the figures after every load, until there are enough."""
        figures, running, began_s = Figures(), list(self._ways), time.perf_counter()
        while True:
            for load in LOADS:
                share, found = self._free_share(), {}
                for name in running:
                    say(trying=name)
                    found[name] = self._images_a_second(self._ways[name], load=load)
                share = min(share, self._free_share())
                figures.add(load, found, quiet=share >= QUIET)
                running = figures.running(running)
                say(**figures.told())
            if figures.enough or time.perf_counter() - began_s > BUSY_S:
                return

    def _images_a_second(self, way: Way, *, load: int) -> float:
        """Run all workers at the same time, with the batches that this many clients give."""
        workers = min(way.engine.workers, load)
        batch = max(1, min(self._request.max_batch, load // workers))
        size = way.resident.manifest.preprocessing.image_size
        blank = np.zeros((size, size, 3), dtype=np.uint8)
        queries = [Query(pixels=blank, residents=(way.resident,))] * batch

        def one() -> None:
            for answer in way.engine.run(way.resident, queries):
                if isinstance(answer, Exception):
                    raise answer

        def every() -> None:
            if workers == 1:  # in this thread, which is the one that torch knows
                one()
            else:
                list(self._pool.map(lambda _: one(), range(workers)))

        return workers * batch / _least_seconds(every)

    def _free_share(self) -> float:
        """Return the share of a processor that each thread gets while all of them work."""
        return min(self._pool.map(_probe, range(self._request.threads)))


def _probe(number: int) -> float:
    wall_s, processor_s = time.perf_counter(), time.thread_time()
    hashlib.sha256(PROBE).digest()
    return (time.thread_time() - processor_s) / (time.perf_counter() - wall_s)


def _least_seconds(run: Callable[[], object]) -> float:
    """Take the least of a few runs: others on the machine only ever add."""
    took: list[float] = []
    for enough_s in (0.0, *REPEATED_BELOW_S):
        if took and min(took) >= enough_s:
            break
        began_s = time.perf_counter()
        run()
        took.append(time.perf_counter() - began_s)
    return min(took)


def say(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
