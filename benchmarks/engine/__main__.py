"""How close the engine comes to what the machine can do, and what a version costs it.

One thread. Forms of a forward pass are timed in turns, and each is its median. Time is processor
time of the thread, so that neighbours on the machine count for less; switching is by the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.engine.grown import paper_spec, publish_lineage, random_network
from benchmarks.engine.literal import literal, literal_flops
from benchmarks.engine.onnx_rows import measure_export, measure_precision
from benchmarks.engine.turns import in_turns
from benchmarks.figures import Figure, at_least, at_most, print_figures
from dne_serve.engines.base import Query, Resident, finish, joined
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.rollout.loaded_versions import EngineRoom, ImageBatcher, LoadedLimits, LoadedVersions
from model_store.inference.forward import FoldedNetwork
from model_store.network.flops import folded_flops
from model_store.records.manifest import ShardRef, delta_of, total_bytes
from model_store.store.store import Store

BATCH = 8
SPEED_UPS = {6: 1.8, 11: 2.1, 26: 2.4}
LARGE = 2048
MIB = 1 << 20

Measured = tuple[list[Figure], dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--rounds", type=int, default=9, help="how often each thing is timed")
    parser.add_argument("--load", nargs=2, metavar=("STORE", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.load:
        print(json.dumps(load_in_this_process(Path(options.load[0]), kind=options.load[1])))
        return 0
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    for measure in (
        measure_forward,
        measure_precision,
        measure_latency,
        measure_hot_load,
        measure_versions,
        measure_export,
    ):
        print(f"{measure.__name__} …", file=sys.stderr)
        found, details = measure(rounds=options.rounds)
        figures += found
        measured |= details
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure_forward(*, rounds: int) -> Measured:
    """The folded form beside the paper's equations as they stand, and the machine's best."""
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    for tasks, asked in SPEED_UPS.items():
        spec = paper_spec(tasks)
        network = random_network(spec)
        images = torch.randn(BATCH, 3, spec.image_size, spec.image_size)
        folded, plain = FoldedNetwork.of(network), literal(network)
        error = largest_difference(folded, plain, images)
        del network
        took = in_turns(
            {
                "folded": partial(folded, images),
                "literal": partial(plain, images),
                "large": large_product(),
            },
            rounds=rounds,
        )
        name = f"folded ÷ reference forward speed, {tasks} tasks"
        figures.append(at_least(name, took["literal"] / took["folded"], asked))
        gflop = folded_flops(spec) / 1e9, literal_flops(spec) / 1e9
        rates = {
            "folded": BATCH * gflop[0] / took["folded"],
            "literal": BATCH * gflop[1] / took["literal"],
            "large matrix": 2 * LARGE**3 / 1e9 / took["large"],
        }
        measured |= {f"GFLOP/s, {tasks} tasks, {what}": rate for what, rate in rates.items()}
        measured |= {f"ms, {tasks} tasks, {what}": 1000 * s for what, s in took.items()}
        measured |= {
            f"GFLOP an image, {tasks} tasks, folded": gflop[0],
            f"GFLOP an image, {tasks} tasks, reference": gflop[1],
            f"largest difference of a logit in 1e-6, {tasks} tasks": 1e6 * error,
        }
        if tasks == 11:
            share = rates["folded"] / rates["large matrix"]
            figures.append(at_least("folded ÷ large-matrix rate, 11 tasks", share, 0.55))
        if tasks == 26:
            name = "folded GFLOP ÷ reference GFLOP, 26 tasks"
            figures.append(at_most(name, gflop[0] / gflop[1], 0.5))
    return figures, measured


def measure_latency(*, rounds: int) -> Measured:
    """One image, through one task and through 26."""
    networks = {
        tasks: FoldedNetwork.of(random_network(paper_spec(tasks))) for tasks in (1, 6, 11, 26)
    }
    image = torch.randn(1, 3, 32, 32)
    took = in_turns(
        {str(tasks): partial(network, image) for tasks, network in networks.items()},
        rounds=3 * rounds,
    )
    figure = at_most("latency at 26 tasks ÷ at 1 task, batch 1", took["26"] / took["1"], 6)
    return [figure], {f"ms, batch 1, {tasks} tasks": 1000 * s for tasks, s in took.items()}


def measure_hot_load(*, rounds: int) -> Measured:
    """Task 26 into a server that serves 25, beside version 26 into an empty one."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder + "/models")
        before, after = publish_lineage(store, random_network(paper_spec(26)), (25, 26))
        whole = total_bytes(after.model_shards)
        share = total_bytes(delta_of(after, before)) / whole
        hot, cold = (
            [in_a_process(folder + "/models", kind) for _ in range(max(3, rounds // 3))]
            for kind in ("hot", "cold")
        )
    middle = {
        name: statistics.median(one[name] for one in hot)
        for name in ("read bytes", "peak bytes", "resident bytes", "seconds", "longest step ms")
    }
    cold_s = statistics.median(one["seconds"] for one in cold)
    memory = middle["peak bytes"] / middle["resident bytes"]
    figures = [
        at_most(
            "hot-load of task 26: bytes read ÷ bytes of the version",
            middle["read bytes"] / whole,
            share + 0.01,
        ),
        at_most("… extra resident memory at its peak ÷ size in memory", memory, 0.15),
        at_most("… time ÷ time into an empty server", middle["seconds"] / cold_s, 0.2),
    ]
    return figures, {
        "delta ÷ version, bytes": share,
        "version in memory, MiB": middle["resident bytes"] / MIB,
        "hot-load, ms": 1000 * middle["seconds"],
        "hot-load, longest step before the trial pass, ms": middle["longest step ms"],
        "load into an empty server, ms": 1000 * cold_s,
    }


def measure_versions(*, rounds: int) -> Measured:
    """Switching between resident versions, and one batch for three of them."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        manifests = publish_lineage(store, random_network(paper_spec(11)), (9, 10, 11))
        engine = TorchEngine(device="cpu", threads=1, max_batch=BATCH)
        residents = [load(engine, store, manifest.version) for manifest in manifests]
    batcher = ImageBatcher(engine.run, max_batch=BATCH, max_queue=64, join=joined)
    batcher.start()
    try:
        switched = switch_s(
            LoadedVersions(EngineRoom(engine, batcher=batcher), limits=LoadedLimits()), residents
        )
    finally:
        batcher.stop()
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, 32, 32, 3), dtype=np.uint8)
    longest = residents[-1]

    def batch(*asked: Resident) -> Callable[[], object]:
        queries = [Query(pixels=one, residents=asked) for one in pixels]
        return lambda: engine.run(longest, queries)

    took = in_turns({"one": batch(longest), "three": batch(*residents)}, rounds=2 * rounds)
    figures = [
        at_most("switching between two resident versions, ms", 1000 * switched, 1),
        at_most("one batch for 3 versions ÷ for one", took["three"] / took["one"], 1.15),
    ]
    return figures, {f"ms, batch of 8 for {name}": 1000 * s for name, s in took.items()}


def large_product() -> Callable[[], object]:
    matrix, product = torch.randn(LARGE, LARGE), torch.empty(LARGE, LARGE)
    return lambda: torch.mm(matrix, matrix, out=product)


def largest_difference(
    folded: FoldedNetwork, plain: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor
) -> float:
    with torch.inference_mode():
        expected = plain(images)
        error = float((folded(images) - expected).abs().max() / expected.abs().max())
    if error > 1e-5:
        sys.exit(f"the folded form is off by {error:.1e} of the largest logit")
    return error


def switch_s(residents: LoadedVersions, versions: list[Resident]) -> float:
    took = []
    for number in range(200):
        began_s = time.perf_counter()
        residents.serve(versions[number % len(versions)])
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def load(engine: TorchEngine, store: Store, version: int) -> Resident:
    return finish(engine.load(engine.fetch(store.manifest(version), read=store.read_shard)))


def in_a_process(store: str, kind: str) -> dict[str, float]:
    """A fresh one, because memory that was used before hides what is used now."""
    command = [sys.executable, "-m", "benchmarks.engine", "--load", store, kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def load_in_this_process(location: Path, *, kind: str) -> dict[str, float]:
    """The newest version, into an empty engine or beside the one before it."""
    store = Store.open(str(location))
    before, newest = store.versions()
    engine = TorchEngine(device="cpu", threads=1, max_batch=BATCH)
    served = None
    if kind == "hot":
        served = load(engine, store, before)
        image = np.zeros((32, 32, 3), dtype=np.uint8)
        engine.run(served, [Query(pixels=image, residents=(served,))] * BATCH)
    reads: list[int] = []

    def read(ref: ShardRef) -> bytes:
        reads.append(ref.bytes)
        return store.read_shard(ref)

    resident_kib = forget_the_peak()
    steps_s: list[float] = []
    began_s = time.process_time()
    loading = engine.load(engine.fetch(store.manifest(newest), read=read))
    while True:
        step_s = time.thread_time()
        try:
            next(loading)
        except StopIteration as end:
            resident: Resident = end.value
            break
        steps_s.append(time.thread_time() - step_s)
    return {
        "seconds": time.process_time() - began_s,
        "longest step ms": 1000 * max(steps_s),
        "read bytes": sum(reads),
        "peak bytes": 1024 * (status_kib("VmHWM") - resident_kib),
        "resident bytes": engine.bank.bytes + resident.manifest.classifier.bytes,
    }


def forget_the_peak() -> int:
    """KiB in use, after giving back what is free: it would hide what a load needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


if __name__ == "__main__":
    sys.exit(main())
