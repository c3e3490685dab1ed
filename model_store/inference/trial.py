"""Runs 16-bit products once, in a process of its own that may die of it.

`python -m model_store.inference.trial bf16 [DEVICE]` ends with the speed-up over single precision
of the same device, on a CPU by one thread, on the last line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from model_store.inference.forward import FoldedNetwork
from model_store.network.device import choose_device
from model_store.network.network import Network
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec

BATCH = 8
RUNS = 7
LONG_S = 0.5
"""A run that takes longer is not repeated: whatever it is, it is not the fastest."""

Run = Callable[[], object]


def main(precision: str, device: str = "cpu") -> float:
    if precision != "bf16":
        raise SystemExit(f"there is no precision {precision} to try")
    torch.set_num_threads(1)
    place = choose_device(device)
    network = paper_like().to(place)
    size = network.spec.image_size
    images = torch.zeros(BATCH, 3, size, size, device=place)

    def running(products: torch.dtype | None) -> Run:
        folded = FoldedNetwork.of(network, products=products)
        return lambda: folded(images).cpu()  # which waits for a GPU

    with torch.inference_mode():
        whole, reduced = (running(products) for products in (None, torch.bfloat16))
        return least_seconds(whole) / least_seconds(reduced)


def paper_like() -> Network:
    """As wide as the `paper` preset, and less deep."""
    torch.manual_seed(0)
    network = Network(NetworkSpec(image_size=32, patch_size=4, depth=1))
    for index, heads in enumerate((12, 1, 1)):
        task = TaskSpec(name=f"{index}", classes=(f"{index}",), expert=ExpertSpec(heads=heads))
        network.expand(task)
    return network.eval()


def least_seconds(run: Run) -> float:
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
    print(main(*sys.argv[1:]))
