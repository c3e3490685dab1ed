"""Measure what traces cost a server: all requests, one of ten, and none, in turns.

    python -m benchmarks.serving.tracing [--rounds N] [--requests N] [--json]

Three servers run beside each other, and one of them is asked at a time. A receiver on this machine
takes the traces, in this process. Compared is the processor time of a server's process for a
request, which has the thread that writes and sends the traces in it.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, at_most, print_figures
from benchmarks.serving.one_server import ask, made_up_photo, one_version, processor_s, serving

SHARES = {"off": None, "0.1": "0.1", "1.0": "1.0"}
FLUSH_S = 1.5
"""Longer than traces wait, so that a turn has all the work that it caused."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what traces cost.")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each server")
    parser.add_argument("--requests", type=int, default=400, help="requests of a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, _receiver() as url, ExitStack() as servers:
        location = one_version(Path(folder) / "models", preset="small")
        started = {
            name: servers.enter_context(serving(location, *_options(share, url)))
            for name, share in SHARES.items()
        }
        figures = measure(started, options.rounds, options.requests, measured)
    print_figures(figures, measured=measured, as_json=options.json)


def _options(share: str | None, url: str) -> tuple[str, ...]:
    return () if share is None else ("--otlp-endpoint", f"{url},sample={share}")


def measure(
    servers: dict[str, tuple[str, int]], rounds: int, requests: int, measured: dict[str, float]
) -> list[Figure]:
    """Compare the processor time of a request with traces and without."""
    image = made_up_photo(0)
    took: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):  # the first turn of each warms up
        for name in sorted(servers, reverse=number % 2 == 0):
            url, pid = servers[name]
            before = processor_s(pid)
            ask(url, image, requests=requests)
            time.sleep(FLUSH_S)
            took[name].append((processor_s(pid) - before) / requests)
    ratios = {
        name: median(b / a for a, b in zip(took["off"][1:], took[name][1:], strict=True))
        for name in ("0.1", "1.0")
    }
    measured |= {
        f"ms of processor time a request, {name}": 1000 * median(found[1:])
        for name, found in took.items()
    }
    measured |= {"turns of each": float(rounds), "requests of a turn": float(requests)}
    return [
        at_most("processor time a request with one of ten traced / none", ratios["0.1"], 1.01),
        at_most("processor time a request with all traced / none", ratios["1.0"], 1.05),
    ]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def _receiver() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    main()
