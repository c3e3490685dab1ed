"""One dne-serve server with one version, and clients that send it a photo again and again."""

from __future__ import annotations

import http.client
import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.engine.grown import publish_lineage, random_network, spec_of
from model_store.store.store import Store

START = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")
START_S = 60.0
OPTIONS = ("--backend", "torch", "--threads", "1", "--log-level", "warning")
CONNECTIONS = 4
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    url: str
    pid: int

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")


@contextmanager
def own_server(location: Path, *options: str, admin_token: str = "") -> Iterator[OwnServer]:
    """Serve a store on a free port of this machine, and stop at the end."""
    surroundings = {**os.environ, **({"DNE_ADMIN_TOKEN": admin_token} if admin_token else {})}
    process = subprocess.Popen(
        [*START, "--store", str(location), "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        env=surroundings,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        ready(url, deadline_s=time.monotonic() + START_S)
        yield OwnServer(url=url, pid=process.pid)
    finally:
        process.terminate()
        process.wait()


def ready(url: str, *, deadline_s: float, pause_s: float = 0.1) -> None:
    """Wait until the server has a model."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz").close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(pause_s)


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


def made_up_photo(seed: int) -> bytes:
    """Make a JPEG of 320 × 240 pixels."""
    grid = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(grid).resize((320, 240), Image.Resampling.BICUBIC).save(written, "JPEG")
    return written.getvalue()
