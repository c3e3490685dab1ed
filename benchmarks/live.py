"""Measure what a live view costs a server, and how many bytes it gets.

    python -m benchmarks.live [--rounds N] [--requests N] [--json]

One server answers the same number of requests with a listener and without one, in turns. Compared
is the processor time of the server's process for a request, because it depends less on what else
the machine does than the throughput does. The server is never idle, so that the listener's share is
taken at full load.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from benchmarks.figures import Figure, at_most, print_figures
from benchmarks.grown import paper_spec, publish_lineage, random_network
from model_store.store.store import Store

START = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")
OPTIONS = ("--backend", "torch", "--threads", "1", "--log-level", "warning")
CONNECTIONS = 4
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a live view costs.")
    parser.add_argument("--rounds", type=int, default=8, help="turns with a listener and without")
    parser.add_argument("--requests", type=int, default=400, help="requests of a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        location = Path(folder) / "models"
        store = Store.create(str(location))
        (manifest,) = publish_lineage(store, random_network(paper_spec(1)), [1])
        store.promote(manifest.version, channel="production", actor="benchmark", reason="")
        figures = measure(location, options.rounds, options.requests, measured)
    print_figures(figures, measured=measured, as_json=options.json)


def measure(location: Path, rounds: int, requests: int, measured: dict[str, float]) -> list[Figure]:
    image = _photo()
    took: dict[str, list[float]] = {"without": [], "with": []}
    listener = Listener()
    with _server(location) as (url, pid):
        for number in range(rounds + 1):  # the first turn of each warms up
            for name in sorted(took, reverse=number % 2 == 0):  # each goes first in turn
                with listener.hears(url) if name == "with" else nullcontext():
                    before = _processor_s(pid)
                    _load(url, image, requests=requests)
                    took[name].append((_processor_s(pid) - before) / requests)
    pairs = [b / a for a, b in zip(took["without"][1:], took["with"][1:], strict=True)]
    measured |= {
        "ms of processor time a request without": 1000 * median(took["without"][1:]),
        "ms of processor time a request with": 1000 * median(took["with"][1:]),
        "smallest of the ratios": min(pairs),
        "largest of the ratios": max(pairs),
        "turns of each": float(rounds),
        "requests of a turn": float(requests),
    }
    return [
        at_most("processor time a request with a listener / without", median(pairs), 1.01),
        at_most("KB a minute that a listener gets", listener.bytes_a_minute / 1000, 10.0),
    ]


class Listener:
    """A client of `GET /live` that counts bytes."""

    def __init__(self) -> None:
        self._bytes = 0
        self._seconds = 0.0

    @property
    def bytes_a_minute(self) -> float:
        return 60 * self._bytes / self._seconds

    @contextmanager
    def hears(self, url: str) -> Iterator[None]:
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"GET /live HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")  # and the first event
            began = time.perf_counter()
            thread = threading.Thread(target=self._read, args=(connection,))
            thread.start()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - began
                connection.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _read(self, connection: socket.socket) -> None:
        while part := connection.recv(65536):
            self._bytes += len(part)


@contextmanager
def _server(location: Path) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [*START, "--store", str(location), "--port", "0", "--json", *OPTIONS],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        _wait(url)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _wait(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/readyz").close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def _processor_s(pid: int) -> float:
    """Read user and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def _load(url: str, image: bytes, *, requests: int) -> None:
    host = url.removeprefix("http://")

    def send(_: int) -> None:
        connection = http.client.HTTPConnection(host)
        for _ in range(requests // CONNECTIONS):
            connection.request("POST", "/predict", image, {"Content-Type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(send, range(CONNECTIONS)))


def _photo() -> bytes:
    grid = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(grid).resize((320, 240), Image.Resampling.BICUBIC).save(written, "JPEG")
    return written.getvalue()


if __name__ == "__main__":
    main()
