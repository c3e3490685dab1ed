"""Runs one pass in a process of its own and prints what it took: `one_pass.py BACKEND BATCH SPEC`.

SPEC is JSON: the fields of a `NetworkSpec` and `heads`, those of each expert.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dne_serve.rollout.memory import pass_bytes
from model_store.codec import ShardWeights, encode_expert
from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.onnx.model import Weights, arrays_of_expert
from model_store.onnx.session import Session
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec


def network_of(fields: dict[str, Any]) -> Network:
    heads = fields.pop("heads")
    network = Network(NetworkSpec(**fields))
    for index, count in enumerate(heads):
        classes, expert = (f"c{index}",), ExpertSpec(heads=count)
        network.expand(TaskSpec(name=f"t{index}", classes=classes, expert=expert))
    return network


def runner(network: Network, backend: str) -> Callable[[Any], object]:
    if backend == "torch":
        lineage = Lineage.of(network)
        return lambda images: lineage.token(torch.from_numpy(images))
    parts = {}
    for index in range(len(network.spec.tasks)):
        prefix = f"experts.{index}"
        weights = ShardWeights(encode_expert(network, index), prefix=f"{prefix}.")
        parts[prefix] = arrays_of_expert(weights, spec=network.spec, index=index, precision="fp32")
    return Session(Weights(spec=network.spec, parts=parts), threads=2)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def main(backend: str, batch: int, fields: dict[str, Any]) -> None:
    network = network_of(fields)
    spec, run = network.spec, runner(network, backend)
    del network
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    images = np.zeros((batch, 3, spec.image_size, spec.image_size), dtype=np.float32)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what is there now
    before = status_bytes("VmRSS")
    with torch.inference_mode():
        run(images)
    took = status_bytes("VmHWM") - before
    print(json.dumps([took, pass_bytes(spec, batch=batch, backend=backend)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
