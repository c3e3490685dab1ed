"""Try 16-bit products in a child process, which a missing instruction may kill.

`python -m model_store.inference.bf16_trial bf16 [DEVICE]` prints the speed-up over single
precision on the last line. A CPU is tried with one thread.
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
REPEATS = 7
LONG_S = 0.5
"""A pass that takes longer is not repeated, because it cannot be the faster one."""


def main(precision: str, device: str = "cpu") -> float:
    if precision != "bf16":
        raise SystemExit(f"precision {precision} cannot be tried here: only bf16")
    torch.set_num_threads(1)
    place = choose_device(device)
    network = paper_like().to(place)
    size = network.spec.image_size
    images = torch.zeros(BATCH, 3, size, size, device=place)

    def seconds(matmul_dtype: torch.dtype | None) -> float:
        folded = FoldedNetwork.of(network, matmul_dtype=matmul_dtype)
        return least_seconds(lambda: folded(images).cpu())  # the copy waits for a GPU

    with torch.inference_mode():
        return seconds(None) / seconds(torch.bfloat16)


def paper_like() -> Network:
    """Build a network as wide as the `paper` preset, with one patch block."""
    torch.manual_seed(0)
    network = Network(NetworkSpec(image_size=32, patch_size=4, depth=1))
    for index, heads in enumerate((12, 1, 1)):
        task = TaskSpec(name=f"{index}", classes=(f"{index}",), expert=ExpertSpec(heads=heads))
        network.expand(task)
    return network.eval()


def least_seconds(run: Callable[[], object]) -> float:
    """Time a few passes and take the least: other load on the machine only adds."""
    found: list[float] = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
        if found[-1] > LONG_S:
            break
    return min(found)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
