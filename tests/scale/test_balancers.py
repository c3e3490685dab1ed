"""Three servers behind a real load balancer: releases, rolling restarts and a kill under load.

HAProxy and nginx run with the files of `deploy/`, on other ports. What is not installed is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from model_store.store.store import Store
from tests.abuse.victim import COMMAND
from tests.campaigns import AddRow
from tests.live_server import wait_for
from tests.trained_store import ROOT, TrainedStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 4
RELEASES = 20
SETTINGS = {"DNE_BACKEND": "torch", "DNE_DRAIN_SECONDS": "3", "OMP_NUM_THREADS": "1"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


@dataclass
class Fleet:
    """Servers of one store, each on a port of its own."""

    store: Path
    ports: Sequence[int]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, port: int) -> None:
        self.processes[port] = subprocess.Popen(
            [*COMMAND, "--port", str(port), "--store", str(self.store)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, **SETTINGS},
        )

    def wait_until_ready(self, port: int) -> None:
        wait_for(lambda: status(f"http://127.0.0.1:{port}/readyz") == 200, seconds=60)

    def stop(self, port: int, number: signal.Signals) -> int:
        self.processes[port].send_signal(number)
        return self.processes[port].wait(timeout=60)


def status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def balancer(name: str, front: int, ports: Sequence[int], folder: Path) -> Iterator[str]:
    """Run a balancer with the file of `deploy/`, with these ports in the place of its own."""
    text = (ROOT / "deploy" / ("haproxy.cfg" if name == "haproxy" else "nginx.conf")).read_text()
    for asked, port in zip((8000, 8001, 8002, 8003), (front, *ports), strict=True):
        text, count = re.subn(rf"127\.0\.0\.1:{asked}\b", f"127.0.0.1:{port}", text)
        assert count == 1
    path = folder / name
    path.write_text(text)
    # Both end with the test: neither becomes a daemon.
    command = ["haproxy", "-f", str(path)]
    if name == "nginx":
        command = ["nginx", "-p", str(folder), "-c", str(path), "-g", "daemon off; user root;"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{front}"
        wait_for(lambda: status(f"{url}/healthz") == 200, seconds=30)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


class Sessions:
    """Clients that never take an older version than the youngest one they have seen."""

    def __init__(self, url: str, *, image: bytes) -> None:
        self._url, self._image = url, image
        self._over = threading.Event()
        self.answered, self.waited, self.went_back = 0, 0, 0
        self.failed: list[str] = []
        self.versions: set[int] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def __enter__(self) -> Sessions:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join()

    def _ask(self) -> None:
        seen = 1
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._over.is_set():
                headers = {"Dne-At-Least": str(seen)}
                try:
                    answer = client.post("/predict", content=self._image, headers=headers)
                except httpx.TransportError as error:
                    self.failed.append(repr(error))
                    continue
                with self._lock:
                    seen = self._count(answer, seen)

    def _count(self, answer: httpx.Response, seen: int) -> int:
        if answer.status_code == 503 and "or a younger one was asked for" in answer.text:
            self.waited += 1
            # A rollback may last: then the session begins anew.
            return 1 if self.waited % 50 == 0 else seen
        if answer.status_code != 200:
            self.failed.append(f"{answer.status_code} {answer.text[:200]}")
            return seen
        version = int(answer.json()["version"])
        self.answered += 1
        self.went_back += version < seen
        self.versions.add(version)
        return max(seen, version)


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
def test_a_fleet_behind_a_balancer_loses_no_request(
    name: str, trained_copy: TrainedStore, tmp_path: Path, scale_row: AddRow
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: NOTHING WAS TRIED BEHIND IT")
    front, *ports = free_ports(4)
    fleet = Fleet(store=trained_copy.location, ports=ports)
    store = Store.open(str(trained_copy.location))
    first, second = trained_copy.first, trained_copy.second
    try:
        for port in ports:
            fleet.start(port)
        for port in ports:
            fleet.wait_until_ready(port)
        with (
            balancer(name, front, ports, tmp_path) as url,
            Sessions(url, image=trained_copy.image("a")) as sessions,
        ):
            wait_for(lambda: sessions.answered > 50, seconds=60)
            for number in range(RELEASES):
                to = second if number % 2 else first
                store.rollback(channel="production", to=to, actor="tests", reason="")
                time.sleep(0.5)
            for port in ports:
                assert fleet.stop(port, signal.SIGTERM) == 0
                fleet.start(port)
                fleet.wait_until_ready(port)
                time.sleep(2)  # until the balancer has noticed
            fleet.stop(ports[0], signal.SIGKILL)
            time.sleep(3)
            fleet.start(ports[0])
            fleet.wait_until_ready(ports[0])
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()
    assert sessions.failed == []
    assert sessions.went_back == 0
    assert sessions.versions == {first, second, trained_copy.served}
    scale_row(
        f"three servers behind {name}",
        f"{RELEASES} releases and rollbacks, 3 rolling restarts, 1 kill -9, {CLIENTS} sessions",
        f"{sessions.answered} answered, {len(sessions.failed)} failed, {sessions.went_back} older "
        f"than one seen, {sessions.waited} told to wait",
    )
