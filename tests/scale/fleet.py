"""Servers of one store in processes of their own, balancers before them, and clients that count."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.abuse.victim import COMMAND
from tests.live_server import wait_for
from tests.trained_store import ROOT

START_S = 300
SETTINGS = {"DNE_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
AT_LEAST = "Dne-At-Least"
TOO_OLD = "or a younger one was asked for"
FOLLOWED_S = 10.0
"""Time after which every server that is up has followed a move, also on a busy machine."""
PATIENCE = 25
"""Times that a session is told to wait before it begins anew: a rollback may last."""
PAUSE_S = 0.03
"""Between two requests of a session: the machine has others to serve too."""


@dataclass
class Fleet:
    """Servers of one store, each on a port and with a cache of its own."""

    store: str
    ports: Sequence[int]
    folder: Path
    settings: Mapping[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, port: int) -> None:
        own = {"DNE_CACHE": str(self.folder / f"cache-{port}"), "DNE_STORE": self.store}
        with (self.folder / f"{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen(
                [*COMMAND, "--port", str(port)],
                stderr=log,
                env={**os.environ, **SETTINGS, **self.settings, **own},
            )

    def start_all(self) -> None:
        for port in self.ports:
            self.start(port)
        for port in self.ports:
            self.wait_until_ready(port)

    def wait_until_ready(self, port: int) -> None:
        wait_for(lambda: status(f"{url_of(port)}/readyz") == 200, seconds=START_S)

    def end(self, port: int, number: signal.Signals) -> int:
        self.processes[port].send_signal(number)
        return self.processes[port].wait(timeout=60)

    def restart_one_by_one(self) -> None:
        for port in self.ports:
            assert self.end(port, signal.SIGTERM) == 0
            self.start(port)
            self.wait_until_ready(port)
            time.sleep(2)  # until the balancer has noticed

    def kill_one(self) -> None:
        self.end(self.ports[0], signal.SIGKILL)
        time.sleep(3)
        self.start(self.ports[0])
        self.wait_until_ready(self.ports[0])

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextmanager
def running(fleet: Fleet) -> Iterator[Fleet]:
    try:
        fleet.start_all()
        yield fleet
    finally:
        fleet.kill_all()


def served_by(fleet: Fleet) -> set[int]:
    """The versions that the servers say they serve."""
    answers = [httpx.get(f"{url_of(port)}/readyz", timeout=10) for port in fleet.ports]
    return {int(answer.json().get("version", 0)) for answer in answers}


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
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
        wait_for(lambda: status(f"{url_of(front)}/healthz") == 200, seconds=30)
        yield url_of(front)
    finally:
        process.terminate()
        process.wait(timeout=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of the answers of a while."""

    median_s: float
    p99_s: float

    def __str__(self) -> str:
        return f"median {1000 * self.median_s:.0f} ms, p99 {1000 * self.p99_s:.0f} ms"


@dataclass
class Seen:
    """Counts of all sessions together."""

    answered: int = 0
    waited: int = 0
    put_off: int = 0
    """Requests for more than the servers have, which the balancer itself answered with "later"."""
    went_back: int = 0
    never_named: int = 0
    failed: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    times: list[tuple[float, float]] = field(default_factory=list)
    """The moment of each answer, and the seconds that it took."""

    def told(self) -> str:
        return (
            f"{self.answered} answered, {len(self.failed)} failed, {self.never_named} by a version "
            f"never named, {self.went_back} older than one seen, {self.waited} told to wait, "
            f"{self.put_off} told so by the balancer"
        )

    def times_of(self, since: float, until: float) -> Times:
        took = sorted(seconds for at, seconds in self.times if since <= at < until)
        return Times(median_s=took[len(took) // 2], p99_s=took[len(took) * 99 // 100])


class Moves:
    """The versions that a channel has named so far, and the newest of them since when."""

    def __init__(self, first: int) -> None:
        self.named = {first}
        self._target, self._at = first, time.monotonic()

    def note(self, version: int) -> None:
        """Call it before the channel is moved."""
        self.named.add(version)
        self._target, self._at = version, time.monotonic()

    def is_due(self, youngest: int) -> bool:
        """Return whether all servers serve a version by now that such a session takes."""
        return self._target >= youngest and time.monotonic() > self._at + FOLLOWED_S


class Sessions:
    """Clients that never take an older version than the youngest one they have seen."""

    def __init__(self, url: str, *, image: bytes, moves: Moves, count: int = 4) -> None:
        self._url, self._image, self._moves = url, image, moves
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        self.seen = Seen()

    def __enter__(self) -> Sessions:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join()

    def _ask(self) -> None:
        youngest, told = 1, 0
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.wait(PAUSE_S):
                if told >= PATIENCE:
                    youngest, told = 1, 0
                began = time.monotonic()
                try:
                    answer = client.post(
                        "/predict", content=self._image, headers={AT_LEAST: str(youngest)}
                    )
                except httpx.TransportError as error:
                    with self._lock:
                        self.seen.failed.append(repr(error))
                    continue
                with self._lock:
                    version = self._count(answer, youngest, time.monotonic() - began)
                told = 0 if version else told + 1
                youngest = max(youngest, version)

    def _count(self, answer: httpx.Response, youngest: int, took_s: float) -> int:
        """Return the version that answered, or 0."""
        seen = self.seen
        if answer.status_code == 503 and TOO_OLD in answer.text:
            seen.waited += 1
            return 0
        put_off = answer.status_code == 503 and "retry-after" in answer.headers
        if put_off and not self._moves.is_due(youngest):
            seen.put_off += 1
            return 0
        if answer.status_code != 200:
            seen.failed.append(f"{answer.status_code} {answer.text[:200]}")
            return 0
        version = int(answer.json()["version"])
        seen.answered += 1
        seen.times.append((time.monotonic(), took_s))
        seen.went_back += version < youngest
        seen.never_named += version not in self._moves.named
        seen.versions.add(version)
        return version
