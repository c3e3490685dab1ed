"""This checkout's server beside an older one's, in turns: requests, memory and time to start.

The store is written by the older software, so that both read the same bytes. `FOLDER` is a checkout
with a `.venv` of its own, such as a worktree that `make` has set up. A figure is the median of the
ratios of neighbouring turns, with its quartiles. Takes about nine minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.serving.compare import png_of
from benchmarks.serving.load import Request, Traffic
from benchmarks.serving.one_server import START_S, processor_s, ready
from benchmarks.serving.servers import ROOT, free_ports
from dne_client.demo.story import write_demo_data

BACKENDS = ("torch", "onnx")
CONNECTIONS = (1, 8)
ALLOWED = 0.03
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    port: int
    pid: int
    start_s: float
    """Until `GET /readyz` answered 200."""

    @property
    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, metavar="FOLDER", help="the older checkout")
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--preset", default="tiny", help="size of the network")
    parser.add_argument("--turns", type=int, default=16, help="of requests, for each load")
    parser.add_argument("--seconds", type=float, default=2.0, help="of load in a turn")
    parser.add_argument("--starts", type=int, default=8, help="of each server")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    figures: list[Figure] = []

    def judge(name: str, judged: Callable[..., Figure], bound: float, ratios: list[float]) -> None:
        low, middle, high = quantiles(ratios, n=4)
        figures.append(judged(f"{name}, new ÷ old", middle, bound))
        measured.update({f"{name}, first quartile": low, f"{name}, third quartile": high})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, image = _learn(options.old, folder, preset=options.preset)
        for backend in BACKENDS:
            starts = _starts(options.old, store, backend, times=options.starts)
            for what, of in (("start", "start_s"), ("memory after start", "resident_mib")):
                judge(
                    f"{backend}: {what}",
                    at_most,
                    1 + ALLOWED,
                    [new[of] / old[of] for old, new in starts],
                )
                measured[f"{backend}: {what}, old"] = median(old[of] for old, _ in starts)
            for connections, turns in _turns(options, store, image, folder, backend):
                title = f"{backend}: requests, {connections} connections"
                judge(title, at_least, 1 - ALLOWED, [new[0] / old[0] for old, new in turns])
                measured[f"{title}, old, 1/s"] = median(old[0] for old, _ in turns)
                measured[f"{title}, processor time, new ÷ old"] = median(
                    new[1] / old[1] for old, new in turns
                )
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def _learn(old: Path, folder: Path, *, preset: str) -> tuple[Path, Request]:
    data, store = write_demo_data(folder / "data"), folder / "models"
    told = ("--data", data.train("digits-0-4"), "--store", store, "--preset", preset)
    command = [_program(old, "dne-train"), "add-task", *told, "--epochs", "2", "--force"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    image = png_of(next(iter(data.test_images())))
    return store, Request(path="/predict", kind="image/png", body=image)


def _starts(
    old: Path, store: Path, backend: str, *, times: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Start each server in turn. The first pair, which fills caches, does not count."""

    def start(checkout: Path) -> dict[str, float]:
        with _serving(checkout, store, backend) as server:
            return {"start_s": server.start_s, "resident_mib": server.resident_mib}

    return [_pair(start, old, turn) for turn in range(times + 1)][1:]


def _turns(
    options: argparse.Namespace, store: Path, image: Request, folder: Path, backend: str
) -> Iterator[tuple[int, list[tuple[tuple[float, float], tuple[float, float]]]]]:
    """Yield requests a second, and processor seconds a request, of each pair of turns."""
    with ExitStack() as stack:
        servers = {
            checkout: stack.enter_context(_serving(checkout, store, backend))
            for checkout in (options.old, ROOT)
        }
        for connections in CONNECTIONS:

            def ask(checkout: Path, connections: int = connections) -> tuple[float, float]:
                server = servers[checkout]
                before_s = processor_s(server.pid)
                seen = Traffic(
                    image,
                    port=server.port,
                    folder=folder,
                    connections=connections,
                    seconds=options.seconds,
                ).seen()
                if seen.failed:
                    raise RuntimeError(f"{checkout}: {seen.failed} requests failed")
                return seen.per_second, (processor_s(server.pid) - before_s) / len(seen.replies)

            yield (
                connections,
                [_pair(ask, options.old, turn) for turn in range(options.turns + 1)][1:],
            )


def _pair(work: Callable[[Path], T], old: Path, turn: int) -> tuple[T, T]:
    """Let old and new work one after the other; the one that begins alternates."""
    took = {checkout: work(checkout) for checkout in (old, ROOT)[:: 1 if turn % 2 else -1]}
    return took[old], took[ROOT]


@contextmanager
def _serving(checkout: Path, store: Path, backend: str) -> Iterator[Started]:
    port, began_s = free_ports(1), time.monotonic()
    command = [_program(checkout, "dne-serve"), "--store", store, "--port", port]
    command += ["--backend", backend, "--precision", "fp32", "--threads", 1]
    process = subprocess.Popen(
        [*map(str, command), "--log-level", "warning"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        ready(f"http://127.0.0.1:{port}", deadline_s=began_s + START_S, pause_s=0.005)
        yield Started(port=port, pid=process.pid, start_s=time.monotonic() - began_s)
    finally:
        process.terminate()
        process.wait()


def _program(checkout: Path, name: str) -> Path:
    return checkout.resolve() / ".venv" / "bin" / name


if __name__ == "__main__":
    sys.exit(main())
