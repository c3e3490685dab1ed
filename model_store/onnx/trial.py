"""Runs a precision once, in a process of its own that may die of it.

`python -m model_store.onnx.trial PRECISION` ends with the speed-up over single precision of the
same backend, one thread, on the last line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model_store.network import Network
from model_store.network.folded import FoldedNetwork
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec

BATCH = 8
RUNS = 7
LONG_S = 0.5
"""A run that takes longer is not repeated: whatever it is, it is not the fastest."""

Run = Callable[[], object]


def main(precision: str) -> float:
    torch.set_num_threads(1)
    network = _network()
    images = torch.zeros(BATCH, 3, network.spec.image_size, network.spec.image_size)
    with torch.inference_mode():
        whole, reduced = _both(network, precision, images)
        return _seconds(whole) / _seconds(reduced)


def _both(network: Network, precision: str, images: Tensor) -> tuple[Run, Run]:
    """The network in single precision and in this one."""
    if precision == "int8":
        whole = Session(weights_of(network), threads=1)
        reduced = Session(weights_of(network, precision="int8"), threads=1)
        return partial(whole, images.numpy()), partial(reduced, images.numpy())
    if precision == "bf16":
        folded = FoldedNetwork.of(network)
        return partial(folded, images), partial(
            FoldedNetwork.of(network.bfloat16()), images.bfloat16()
        )
    raise SystemExit(f"there is no precision {precision} to try")


def _network() -> Network:
    """As wide as the `paper` preset, and less deep."""
    torch.manual_seed(0)
    network = Network(NetworkSpec(image_size=32, patch_size=4, depth=1))
    for index, heads in enumerate((12, 1, 1)):
        task = TaskSpec(name=f"{index}", classes=(f"{index}",), expert=ExpertSpec(heads=heads))
        network.expand(task)
    return network.eval()


def _seconds(run: Run) -> float:
    """The least of a few runs: others on the machine only ever add."""
    found: list[float] = []
    for _ in range(1 + RUNS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
        if found[-1] > LONG_S:
            break
    return min(found)


if __name__ == "__main__":
    print(main(sys.argv[1]))
