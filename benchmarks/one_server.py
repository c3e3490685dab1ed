"""One server with one version, and clients that send it a photo again and again."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.grown import publish_lineage, random_network, spec_of
from benchmarks.own_server import own_server
from model_store.store.store import Store

OPTIONS = ("--backend", "torch", "--threads", "1", "--log-level", "warning")
CONNECTIONS = 4
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def one_version(location: Path, *, preset: str = "paper") -> Path:
    """Make a store with one version that production names."""
    store = Store.create(str(location))
    (manifest,) = publish_lineage(store, random_network(spec_of(preset, 1)), [1])
    store.promote(manifest.version, channel="production", actor="benchmark", reason="")
    return location


@contextmanager
def serving(location: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Start a server. Yield its URL and the id of its process once it is ready."""
    with own_server(location, *OPTIONS, *options) as server:
        yield server.url, server.pid


def processor_s(pid: int) -> float:
    """Read user and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def ask(url: str, image: bytes, *, requests: int) -> float:
    """Send the image so often, over a few connections. Return the seconds that it took."""
    host = url.removeprefix("http://")

    def send(_: int) -> None:
        connection = http.client.HTTPConnection(host)
        for _ in range(requests // CONNECTIONS):
            connection.request("POST", "/predict", image, {"Content-Type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
        connection.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(send, range(CONNECTIONS)))
    return time.perf_counter() - began
