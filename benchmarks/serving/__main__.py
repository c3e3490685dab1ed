"""The server beside its peers, and under changes of version and overload.

Every server has the same weights, precision and two threads, each in an environment of its own that
is made on first use, in turns with ours (`compare.py`). Peers run the network as PyTorch modules;
one of them once more with the forward pass of our own torch backend, to tell how much is the
server's and how much the engine's. The client is `load.py`. Takes about half an hour, and wants a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE

import numpy as np

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.serving.changes import measure_changes, measure_overload
from benchmarks.serving.compare import (
    CONNECTIONS,
    IMAGE_SIZE,
    SETTLE_S,
    Sessions,
    ask,
    compare,
    learn_a_version,
)
from benchmarks.serving.peers.model import MAX_BATCH
from benchmarks.serving.servers import (
    PEERS,
    PLAIN,
    THREADS,
    WITH_OUR_FORWARD_PASS,
    ours,
    running,
)
from dne_serve.engines.base import Engine, Query, Resident, finish
from dne_serve.engines.choose import choose_engine
from model_store.store.store import Store

LOOP_S = 3.0
OURS = ours("dne-serve fp32", "--precision", "fp32")
OURS_BY_TORCH = ours("dne-serve fp32 torch", "--backend", "torch", "--precision", "fp32")
OURS_AT_BEST = ours("dne-serve auto")
Measured = tuple[list[Figure], dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--turns", type=int, default=5, help="that each server takes")
    parser.add_argument("--seconds", type=float, default=2.5, help="of load in a turn")
    parser.add_argument("--changes", type=int, default=200, help="changes of version under load")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--without-peers", action="store_true", help="our own servers alone")
    parser.add_argument("--loop", metavar="STORE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        loop_in_this_process(options.loop)
        return 0
    # As Ctrl-C does: the server under test must not stay behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, image = learn_a_version(folder)
        peers = () if options.without_peers else (PLAIN, *PEERS, WITH_OUR_FORWARD_PASS)
        sessions = compare(
            (OURS, OURS_AT_BEST),
            (*peers, OURS_BY_TORCH),
            store=store,
            image=image,
            folder=folder,
            turns=options.turns,
            seconds=options.seconds,
        )
        loops = measure_loop(store=store, image=image, folder=folder, turns=options.turns)
        parts = [
            judge(sessions, loops),
            *(
                measure_changes(one, store=store, image=image, folder=folder, count=options.changes)
                for one in (OURS_BY_TORCH, OURS)
            ),
            measure_overload(
                OURS,
                store=store,
                image=image,
                folder=folder,
                capacity=sessions.rate(OURS.name, 32),
                seconds=options.overload_seconds,
            ),
        ]
    figures = [figure for found, _ in parts for figure in found]
    measured = {name: value for _, found in parts for name, value in found.items()}
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def judge(sessions: Sessions, loops: Sequence[Beside]) -> Measured:
    peers = [one.name for one in PEERS if one.name in sessions.others]
    figures = []
    for connections in CONNECTIONS if peers else ():
        ratio = min(sessions.ratio(OURS.name, name, connections) for name in peers)
        name = f"throughput ÷ best model server, same precision, {connections} connections"
        figures.append(at_least(name, ratio, 1.2))
    if peers:
        ratio = sessions.ratio(OURS.name, PLAIN.name, 1)
        figures.append(at_least("throughput ÷ plain FastAPI, 1 connection", ratio, 1.1))
        ratio = min(
            sessions.rate(OURS_AT_BEST.name, 32, beside=name)
            / max(sessions.rate(name, connections, beside=name) for connections in CONNECTIONS)
            for name in peers
        )
        name = "throughput at --precision auto, 32 connections ÷ best peer at its best"
        figures.append(at_least(name, ratio, 2.5))
    middle_s, slow_s = (sessions.quantile_s(OURS.name, 32, share) for share in (0.5, 0.99))
    figures += [
        at_least(
            f"throughput ÷ our engine in a loop of batches of {MAX_BATCH}, 32 connections",
            median(one.served / one.looped for one in loops),
            0.92,
        ),
        at_most("p99 ÷ p50, 32 connections", slow_s / middle_s, 2),
    ]
    measured = {}
    for name in (OURS.name, OURS_AT_BEST.name, *sessions.others):
        for connections in CONNECTIONS:
            what = f"{name}, {connections} connections"
            measured[f"requests/s, {what}"] = sessions.rate(name, connections)
            for share, called in ((0.5, "p50"), (0.99, "p99")):
                found_s = sessions.quantile_s(name, connections, share)
                measured[f"{called} ms, {what}"] = 1000 * found_s
            measured[f"failed, {what}"] = sessions.failed(name, connections)
    for name in sessions.others:
        for connections in CONNECTIONS:
            what = f"{OURS.name} ÷ {name}, {connections} connections"
            measured[what] = sessions.ratio(OURS.name, name, connections)
    rate = median(one.looped for one in loops)
    measured[f"images/s, our engine in a loop, batches of {MAX_BATCH}"] = rate
    return figures, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Images a second by the server, and right after it by its engine in a loop."""

    served: float
    looped: float


def measure_loop(*, store: Path, image: bytes, folder: Path, turns: int) -> list[Beside]:
    command = [sys.executable, "-m", "benchmarks.serving", "--loop", str(store)]
    found = []
    with (
        running(OURS, store=store, folder=folder, image=image) as live,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as loop,
    ):
        assert loop.stdin is not None
        assert loop.stdout is not None
        loop.stdout.readline()  # it is ready
        for _ in range(turns):
            seen = ask(live, connections=32, folder=folder, seconds=LOOP_S)
            print("again", file=loop.stdin, flush=True)
            found.append(Beside(served=seen.per_second, looped=float(loop.stdout.readline())))
            print(f"32 connections: {found[-1]}", file=sys.stderr)
    return found


def loop_in_this_process(location: Path) -> None:
    """Images a second without a server, whenever a line is read: engine, version, threads and
    workers as ours has them. First says that it is ready."""
    store = Store.open(str(location))
    engine = choose_engine(
        "onnx", device="cpu", threads=THREADS, max_batch=MAX_BATCH, precision="fp32", pack=True
    )
    manifest = store.manifest(1)
    resident = finish(engine.load(engine.fetch(manifest, read=store.read_shard)))
    blank = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    queries = [Query(pixels=blank, residents=(resident,))] * MAX_BATCH
    print("ready", flush=True)
    for _ in sys.stdin:
        _loop(engine, resident, queries, SETTLE_S)
        print(_loop(engine, resident, queries, LOOP_S), flush=True)


def _loop(engine: Engine, resident: Resident, queries: list[Query], seconds: float) -> float:
    """By all workers."""
    counts: list[int] = []
    began_s = time.perf_counter()

    def run() -> None:
        count = 0
        while time.perf_counter() - began_s < seconds:
            engine.run(resident, queries)
            count += len(queries)
        counts.append(count)

    workers = [threading.Thread(target=run) for _ in range(engine.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began_s)


if __name__ == "__main__":
    sys.exit(main())
