"""The server beside its peers, and under changes of version and overload.

Every server runs the same weights with the same forward pass on the same two threads, each in an
environment of its own that is made on first use, one after the other, in rounds. The client is
`benchmarks/load.py`. Takes about half an hour, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.changes import measure_changes, measure_overload
from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.load import Seen, Traffic, middle
from benchmarks.peers.model import MAX_BATCH
from benchmarks.servers import PEERS, PLAIN, THREADS, Server, ours, running
from deploy.demo_data import write_demo_data
from dne_serve.engine import Engine, Query, Resident, choose_engine, finish
from model_store.store import Store

CONNECTIONS = (1, 8, 32)
SETTLE_S = 2.0
PACKED = ("--pack-weights",)
OURS = ours("dne-serve fp32", "--backend", "onnx", "--precision", "fp32", *PACKED)
OURS_BY_TORCH = ours("dne-serve fp32 torch", "--backend", "torch", "--precision", "fp32")
OURS_AT_BEST = ours("dne-serve auto", "--backend", "auto", "--precision", "auto", *PACKED)
Measured = tuple[list[Figure], dict[str, float]]
OTHERS = {OURS.name, OURS_BY_TORCH.name, OURS_AT_BEST.name, PLAIN.name}
Rounds = dict[tuple[str, int], list[Seen]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is started")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load at a time")
    parser.add_argument("--changes", type=int, default=200, help="changes of version under load")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--without-peers", action="store_true", help="our own servers alone")
    parser.add_argument("--loop", metavar="STORE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        print(json.dumps(loop_in_this_process(options.loop)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, image = learn_a_version(folder)
        peers = () if options.without_peers else (PLAIN, *PEERS)
        rounds, loops = measure_throughput(
            (OURS, *peers, OURS_BY_TORCH, OURS_AT_BEST),
            store=store,
            image=image,
            folder=folder,
            rounds=options.rounds,
            seconds=options.seconds,
        )
        parts = [
            judge_throughput(rounds, loops),
            *(
                measure_changes(one, store=store, image=image, folder=folder, count=options.changes)
                for one in (OURS_BY_TORCH, OURS)
            ),
            measure_overload(
                OURS,
                store=store,
                image=image,
                folder=folder,
                capacity=middle(rounds[OURS.name, 32], "per_second"),
                seconds=options.overload_seconds,
            ),
        ]
    figures = [figure for found, _ in parts for figure in found]
    measured = {name: value for _, found in parts for name, value in found.items()}
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def learn_a_version(folder: Path) -> tuple[Path, bytes]:
    """Digits in the `paper` preset: 10.7 million parameters, images of 32 pixels."""
    data, store = write_demo_data(folder / "data"), folder / "models"
    program = Path(sys.executable).with_name("dne-train")
    told = ("--data", data.train("digits-0-4"), "--store", store, "--preset", "paper")
    command = [program, "add-task", *told, "--epochs", "10", "--augment", "none"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    image = next(iter(data.test_images())).read_bytes()
    return store, image


def measure_throughput(
    servers: tuple[Server, ...],
    *,
    store: Path,
    image: bytes,
    folder: Path,
    rounds: int,
    seconds: float,
) -> tuple[Rounds, dict[int, list[float]]]:
    """What the client saw of each server at each number of connections; and the images a second of
    our engine in a loop, by batch size."""
    seen: Rounds = defaultdict(list)
    loops: dict[int, list[float]] = defaultdict(list)
    for number in range(rounds):
        for server in servers:
            if server is OURS:
                for size, rate in in_a_loop(store).items():
                    loops[size].append(rate)
            with running(server, store=store, folder=folder, image=image) as live:
                for connections in CONNECTIONS:
                    began_s = time.monotonic()
                    traffic = Traffic(
                        live.request,
                        port=live.port,
                        folder=folder,
                        connections=connections,
                        seconds=SETTLE_S + seconds,
                    )
                    all_of_it = traffic.seen()
                    steady = all_of_it.between(began_s + SETTLE_S, float("inf"))
                    seen[server.name, connections].append(steady)
                    tell(number + 1, server, connections, steady)
    return seen, loops


def tell(number: int, server: Server, connections: int, seen: Seen) -> None:
    middle_ms, slow_ms = (1000 * seen.quantile_s(share) for share in (0.5, 0.99))
    print(
        f"round {number}, {server.name}, {connections} connections: {seen.per_second:.0f} a "
        f"second, p50 {middle_ms:.0f} ms, p99 {slow_ms:.0f} ms, {seen.failed} failed, "
        f"client {seen.processor_s:.1f} s of processor time",
        file=sys.stderr,
    )


def judge_throughput(rounds: Rounds, loops: dict[int, list[float]]) -> Measured:
    rate = {key: middle(seen, "per_second") for key, seen in rounds.items()}
    quantile = {
        share: float(np.median([one.quantile_s(share) for one in rounds[OURS.name, 32]]))
        for share in (0.5, 0.99)
    }
    loop = float(np.median(loops[MAX_BATCH]))
    peers = sorted({name for name, _ in rounds} - OTHERS)
    figures = []
    for connections in CONNECTIONS if peers else ():
        best = max(rate[name, connections] for name in peers)
        name = f"throughput ÷ best model server, same precision, {connections} connections"
        figures.append(at_least(name, rate[OURS.name, connections] / best, 1.2))
    if peers:
        plain = rate[PLAIN.name, 1]
        figures.append(
            at_least("throughput ÷ plain FastAPI, 1 connection", rate[OURS.name, 1] / plain, 1.1)
        )
        best = max(rate[name, connections] for name in peers for connections in CONNECTIONS)
        figures.append(
            at_least(
                "throughput at --precision auto, 32 connections ÷ best peer at its best",
                rate[OURS_AT_BEST.name, 32] / best,
                2.5,
            )
        )
    figures += [
        at_least(
            f"throughput ÷ our engine in a loop of batches of {MAX_BATCH}, 32 connections",
            rate[OURS.name, 32] / loop,
            0.92,
        ),
        at_most("p99 ÷ p50, 32 connections", quantile[0.99] / quantile[0.5], 2),
    ]
    measured = {}
    for (name, connections), seen in rounds.items():
        what = f"{name}, {connections} connections"
        measured[f"requests/s, {what}"] = rate[name, connections]
        measured[f"p50 ms, {what}"] = 1000 * float(np.median([o.quantile_s(0.5) for o in seen]))
        measured[f"p99 ms, {what}"] = 1000 * float(np.median([o.quantile_s(0.99) for o in seen]))
        measured[f"failed, {what}"] = sum(one.failed for one in seen)
    for size, found in loops.items():
        measured[f"images/s, our engine in a loop, batches of {size}"] = float(np.median(found))
    return figures, measured


def in_a_loop(store: Path) -> dict[int, float]:
    command = [sys.executable, "-m", "benchmarks.serving", "--loop", str(store)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {int(size): rate for size, rate in found.items()}


def loop_in_this_process(location: Path, *, seconds: float = 4.0) -> dict[int, float]:
    """Images a second without a server: engine, version, threads and workers as ours has them."""
    store = Store.open(str(location))
    engine = choose_engine(
        "onnx", device="cpu", threads=THREADS, max_batch=MAX_BATCH, precision="fp32", pack=True
    )
    manifest = store.manifest(1)
    resident = finish(engine.load(engine.fetch(manifest, read=store.read_shard)))
    blank = np.zeros((32, 32, 3), dtype=np.uint8)
    return {
        size: _loop(engine, resident, [Query(pixels=blank, residents=(resident,))] * size, seconds)
        for size in (1, 8, MAX_BATCH)
    }


def _loop(engine: Engine, resident: Resident, queries: list[Query], seconds: float) -> float:
    """One image at a time by one worker, batches by all."""
    counts: list[int] = []
    began_s = time.perf_counter()

    def run() -> None:
        count = 0
        while time.perf_counter() - began_s < seconds:
            engine.run(resident, queries)
            count += len(queries)
        counts.append(count)

    workers = [threading.Thread(target=run) for _ in range(engine.workers if queries[1:] else 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    sys.exit(main())
