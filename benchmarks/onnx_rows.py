"""The figures of ONNX and of reduced precision. One thread; ratios within one run.

python -m benchmarks.onnx_rows [--json]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.codec import encode_classifier, encode_expert
from model_store.manifest import Draft, Preprocessing, TaskRecord, geometry_of
from model_store.network import Network
from model_store.network.folded import FoldedNetwork
from model_store.onnx import export_onnx
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session
from model_store.shard import shard_ref
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
from model_store.store import Store, timestamp

RUNS = 9
Rows = tuple[list[Figure], dict[str, float]]


def measure_onnx(folder: Path) -> Rows:
    """What exporting costs, and whether the answers are those of torch."""
    store, network = Store.create(str(folder / "models")), paper_network(8)
    older = export_onnx(store, publish(store, network), out=folder / "onnx")
    grow(network, until=9)
    younger = export_onnx(store, publish(store, network), out=folder / "onnx")
    grow(network, until=11)
    version = publish(store, network)
    started, used = time.perf_counter(), time.process_time()
    export_onnx(store, version, out=folder / "alone")
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = network(images).numpy()
    found = Session(weights_of(network), threads=1)(images.numpy())
    figures = [
        at_most(
            "ONNX, version 9 after 8: bytes written ÷ bytes of a full export",
            younger.written_bytes / younger.total_bytes,
            0.25,
        ),
        at_most("ONNX, export of 11 tasks, seconds", seconds, 2),
        at_most("ONNX, largest difference of a logit", float(np.abs(found - expected).max()), 1e-4),
    ]
    measured = {
        "export of 11 tasks, seconds of processor time": processor,
        "full export of 8 tasks, MB": older.total_bytes / 1e6,
        "version 9 after 8, MB": younger.written_bytes / 1e6,
    }
    return figures, measured


def measure_precision() -> Rows:
    """6 tasks, batch 8. By the processor time of the thread: others on the machine count less."""
    network = paper_network(6)
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    folded = FoldedNetwork.of(network)
    whole = Session(weights_of(network), threads=1)
    small = Session(weights_of(network, precision="int8"), threads=1)
    with torch.inference_mode():
        medians = interleaved(
            {
                "torch fp32": lambda: folded(images),
                "onnx fp32": lambda: whole(images.numpy()),
                "onnx int8": lambda: small(images.numpy()),
            }
        )
    best = min(medians["torch fp32"], medians["onnx fp32"])
    figures = [
        at_least("best precision ÷ best fp32, 6 tasks, batch 8", best / medians["onnx int8"], 1.6)
    ]
    return figures, {f"{name}, ms a batch": 1000 * value for name, value in medians.items()}


def interleaved(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median seconds of each, one after the other in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + RUNS):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            if turn:  # the first one is for warming up
                seconds[name].append(time.thread_time() - started)
    return {name: float(np.median(found)) for name, found in seconds.items()}


def paper_network(tasks: int) -> Network:
    """The `paper` preset with one head a task, far from its special starting values."""
    torch.manual_seed(0)
    network = Network(NetworkSpec(image_size=32, patch_size=4, depth=5))
    grow(network, until=tasks)
    return network


def grow(network: Network, *, until: int) -> None:
    for index in range(len(network.spec.tasks), until):
        classes = tuple(f"class {index}-{place}" for place in range(10))
        heads = 1 if index else 12
        task = TaskSpec(name=f"{index}", classes=classes, expert=ExpertSpec(heads=heads))
        network.expand(task)
        with torch.no_grad():
            for parameter in network.learnable():
                parameter.add_(0.02 * torch.randn_like(parameter))
    network.eval()


def publish(store: Store, network: Network) -> int:
    shards: dict[str, bytes] = {}
    tasks = []
    for index, task in enumerate(network.spec.tasks):
        data = encode_expert(network, index)
        ref = shard_ref("expert", data)
        shards[ref.sha256] = data
        tasks.append(
            TaskRecord(name=task.name, classes=task.classes, heads=task.expert.heads, expert=ref)
        )
    data = encode_classifier(network)
    classifier = shard_ref("classifier", data)
    draft = Draft(
        transaction=uuid.uuid4().hex,
        network=geometry_of(network.spec),
        preprocessing=Preprocessing(image_size=network.spec.image_size),
        tasks=tuple(tasks),
        classifier=classifier,
        created=timestamp(),
        software="benchmark",
    )
    return store.publish(draft, shards={**shards, classifier.sha256: data}).version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        parts = [measure_onnx(Path(folder)), measure_precision()]
    measured = {name: value for _, found in parts for name, value in found.items()}
    figures = [figure for found, _ in parts for figure in found]
    print_figures(figures, measured=measured, as_json=options.json)


if __name__ == "__main__":
    main()
