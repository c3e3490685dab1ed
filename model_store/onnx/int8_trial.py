"""Try 8-bit products in a child process, which a missing instruction may kill.

`python -m model_store.onnx.int8_trial int8` prints the speed-up over single precision in
onnxruntime with one thread on the last line.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from model_store.inference.bf16_trial import BATCH, least_seconds, paper_like
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session


def main(precision: str) -> float:
    if precision != "int8":
        raise SystemExit(f"precision {precision} cannot be tried here: only int8")
    torch.set_num_threads(1)
    network = paper_like()
    size = network.spec.image_size
    images = np.zeros((BATCH, 3, size, size), dtype=np.float32)
    whole = Session(weights_of(network), threads=1)
    reduced = Session(weights_of(network, precision="int8"), threads=1)
    return least_seconds(lambda: whole(images)) / least_seconds(lambda: reduced(images))


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
