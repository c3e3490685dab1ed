"""Measure what a live view costs a server, and how many bytes it gets.

    python -m benchmarks.serving.live [--rounds N] [--requests N] [--seconds S] [--json]

One server answers the same number of requests with a listener and without one, in turns. Compared
are the throughput, and the processor time of the server's process for a request, which depends less
on what else the machine does. Afterwards nobody asks for a time, and the thread of the
event loop is timed alone: what it takes longer with a listener is what the listener costs.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.serving.one_server import ask, made_up_photo, one_version, processor_s, serving


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a live view costs.")
    parser.add_argument("--rounds", type=int, default=8, help="turns with a listener and without")
    parser.add_argument("--requests", type=int, default=400, help="requests of a turn")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds without requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(one_version(Path(folder) / "models")) as (url, pid),
    ):
        turns = Turns(url=url, pid=pid, listener=Listener())
        figures = measure(turns, options.rounds, options.requests, measured)
        figures += measure_idle(turns, options.seconds, measured)
    print_figures(figures, measured=measured, as_json=options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A server that takes turns with a listener and without one."""

    url: str
    pid: int
    listener: Listener

    def turn(self, name: str) -> AbstractContextManager[None]:
        return self.listener.hears(self.url) if name == "with" else nullcontext()


def measure(turns: Turns, rounds: int, requests: int, measured: dict[str, float]) -> list[Figure]:
    """Compare throughput, and the processor time of a request, with and without a listener."""
    image = made_up_photo(0)
    took: dict[str, list[float]] = {"without": [], "with": []}
    pace: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds + 1):  # the first turn of each warms up
        for name in sorted(took, reverse=number % 2 == 0):  # each goes first in turn
            with turns.turn(name):
                before = processor_s(turns.pid)
                pace[name].append(requests / ask(turns.url, image, requests=requests))
                took[name].append((processor_s(turns.pid) - before) / requests)
    pairs = _ratios(took)
    paces = _ratios(pace)
    measured |= {
        "ms of processor time a request without": 1000 * median(took["without"][1:]),
        "ms of processor time a request with": 1000 * median(took["with"][1:]),
        "smallest of the ratios": min(pairs),
        "largest of the ratios": max(pairs),
        "requests a second without": median(pace["without"][1:]),
        "requests a second with": median(pace["with"][1:]),
        "smallest of the ratios of throughput": min(paces),
        "largest of the ratios of throughput": max(paces),
        "turns of each": float(rounds),
        "requests of a turn": float(requests),
    }
    return [
        at_least("requests a second with a listener / without", median(paces), 0.99),
        at_most("processor time a request with a listener / without", median(pairs), 1.01),
        at_most("KB a minute for a listener", turns.listener.bytes_a_minute / 1000, 10.0),
    ]


def _ratios(found: dict[str, list[float]]) -> list[float]:
    """Divide the turns with a listener by those without one, round by round, after the first."""
    return [b / a for a, b in zip(found["without"][1:], found["with"][1:], strict=True)]


def measure_idle(turns: Turns, seconds: float, measured: dict[str, float]) -> list[Figure]:
    """Time the event loop's thread while nobody asks, with what it remembers of the turns."""
    shares: dict[str, float] = {}
    for name in ("without", "with"):
        with turns.turn(name):
            before = _event_loop_s(turns.pid)
            time.sleep(seconds)
            shares[name] = (_event_loop_s(turns.pid) - before) / seconds
    measured |= {f"% of a core, idle, {name}": 100 * share for name, share in shares.items()}
    cost = 100 * (shares["with"] - shares["without"])
    return [at_most("% of a core for a listener", cost, 1.0)]


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


def _event_loop_s(pid: int) -> float:
    """Read the time that the main thread has had a core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
