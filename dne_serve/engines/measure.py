"""Measure the candidates for an engine, in a process of its own that may die of it.

`python -m dne_serve.engines.measure REQUEST` prints a line of JSON after every load. The network
has the shape of the served version and random weights, as time depends on the shape alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dne_serve.engines.candidates import Measurement, Request, ThreadPlan
from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session

LOADS = (8, 1, 32)
"""Images under way, the most telling number first."""
ENOUGH = 2
"""Loads of which the figures are worth remembering."""
LOST = 0.7
"""Share of the best candidate's speed at the first load, below which one is not run again."""
REPEATED_BELOW_S = (0.4, 0.1)
"""Seconds below which a run is repeated, once and once more: there are a few for all candidates."""
ROWS = 512
"""Rows of patches that 8 bits are compared on, in 8 images at most."""
MAX_ROUNDS = 5

Images = NDArray[np.float32]
Pass = Callable[[Images], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The passes of a candidate: over a lone image, and over a batch beside other workers."""

    alone: Pass
    beside: Pass
    workers: int = 1


def main(told: str) -> None:
    began_s = time.perf_counter()
    asked = Measurement.model_validate_json(told)
    request = asked.request
    torch.manual_seed(0)
    network = Network(request.spec).eval()
    torch.set_num_threads(request.threads)
    with torch.inference_mode(), ThreadPoolExecutor(max_workers=2) as pool:
        ways = ways_of(network, request)
        speedup = int8_speedup(network) if asked.try_int8 else None
        until_s = began_s + asked.seconds
        for figures in measured(ways, request=request, pool=pool, until_s=until_s):
            enough = max(len(one) for one in figures.values()) >= ENOUGH
            line = {"figures": figures, "enough": enough, "int8_speedup": speedup}
            print(json.dumps(line), flush=True)


def ways_of(network: Network, request: Request) -> dict[str, Ways]:
    """Build the candidates. Those that differ in workers only share their sessions."""
    candidates, threads, found = request.candidates, request.threads, dict[str, Ways]()
    weights = weights_of(network, precision="int8" if "int8" in request.reduced else "fp32")
    for packed in {one.packed for one in candidates if one.backend == "onnx"}:
        alike = [one for one in candidates if one.backend == "onnx" and one.packed == packed]
        alone = Session(weights, threads=threads, pack=packed)
        for one in alike:
            plan = ThreadPlan.of(threads=threads, workers=one.workers)
            beside = alone
            if plan.workers > 1:
                beside = Session(weights, threads=plan.share, pack=packed)
            found[one.name] = Ways(alone=alone, beside=beside, workers=plan.workers)
    if candidates[0].backend == "torch":
        reduced = torch.bfloat16 if "bf16" in request.reduced else None
        folded = FoldedNetwork.of(network, matmul_dtype=reduced)
        folded.lineage.reserve(request.max_batch)
        by_torch: Pass = lambda images: folded(torch.from_numpy(images))  # noqa: E731
        found["torch"] = Ways(alone=by_torch, beside=by_torch)
    return {one.name: found[one.name] for one in candidates}


def int8_speedup(network: Network) -> float:
    """Compare 8 bits with single precision in the same runtime and one thread."""
    size = network.spec.image_size
    batch = max(1, min(8, ROWS // network.spec.positions))
    images = np.zeros((batch, 3, size, size), dtype=np.float32)
    whole = Session(weights_of(network), threads=1)
    reduced = Session(weights_of(network, precision="int8"), threads=1)
    return _least_seconds(lambda: whole(images)) / _least_seconds(lambda: reduced(images))


def measured(
    ways: Mapping[str, Ways],
    *,
    request: Request,
    pool: ThreadPoolExecutor,
    until_s: float,
) -> Iterator[dict[str, dict[int, float]]]:
    """Give the figures after every load that the candidates have run, until the time is over."""
    best: dict[str, dict[int, float]] = {name: {} for name in ways}
    size, max_batch = request.network.image_size, request.max_batch
    for number in range(MAX_ROUNDS * len(LOADS)):
        load, found = LOADS[number % len(LOADS)], {}
        for name in _running(best):
            if time.perf_counter() > until_s:
                return
            found[name] = images_a_second(
                ways[name], load=load, size=size, max_batch=max_batch, pool=pool
            )
        for name, rate in found.items():
            best[name][load] = max(rate, best[name].get(load, 0.0))
        yield {name: dict(sorted(one.items())) for name, one in best.items()}


def _running(best: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Leave out the candidates that have lost at the first load."""
    rates = {name: one.get(LOADS[0], 0.0) for name, one in best.items()}
    enough = LOST * max(rates.values())
    return [name for name, rate in rates.items() if rate >= enough]


def images_a_second(
    ways: Ways, *, load: int, size: int, max_batch: int, pool: ThreadPoolExecutor
) -> float:
    """Run all workers at the same time, with the batches that this many clients give."""
    batch = max(1, min(max_batch, load // ways.workers))
    images = np.zeros((batch, 3, size, size), dtype=np.float32)
    workers = min(ways.workers, load)

    def run() -> None:
        if load == 1:
            ways.alone(images)
        elif workers == 1:  # in this thread, which is the one that torch knows
            ways.beside(images)
        else:
            list(pool.map(lambda _: ways.beside(images), range(workers)))

    return workers * batch / _least_seconds(run)


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


if __name__ == "__main__":
    main(sys.argv[1])
