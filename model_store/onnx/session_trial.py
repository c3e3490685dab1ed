"""Runs 8-bit products once, in a process of its own that may die of it.

`python -m model_store.onnx.session_trial int8` ends with the speed-up over single precision of the
same backend, one thread, on the last line.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from model_store.inference.trial import BATCH, least_seconds, paper_like
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session


def main(precision: str) -> float:
    if precision != "int8":
        raise SystemExit(f"there is no precision {precision} to try")
    torch.set_num_threads(1)
    network = paper_like()
    size = network.spec.image_size
    images = np.zeros((BATCH, 3, size, size), dtype=np.float32)
    whole = Session(weights_of(network), threads=1)
    reduced = Session(weights_of(network, precision="int8"), threads=1)
    return least_seconds(lambda: whole(images)) / least_seconds(lambda: reduced(images))


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
