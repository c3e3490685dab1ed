"""A client that costs little: connections that send the same request again and again, one thread.

Closed loop: each connection sends as soon as it has its answer. Open loop, with a rate: requests
are due at fixed times, whatever became of those before. A process of its own; what it saw is
written to a file, one line an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

FAILED = 0
"""The status of a request whose connection broke before its answer."""
MODEL = b"{model}"
VERSION = re.compile(rb'"version":\s*(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The bytes of one image, as a server wants them."""

    path: str
    """Where `{model}` stands, requests name one model after the other."""
    kind: str
    body: bytes

    def on_the_wire(self, port: int) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: */*\r\n"
            f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(frozen=True, slots=True)
class Reply:
    """Times by the clock that all processes of a machine share."""

    connection: int
    began_s: float
    ended_s: float
    status: int
    version: int

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    replies: tuple[Reply, ...]
    unsent: int
    """Requests that were due while all connections waited."""
    processor_s: float
    """What the client itself has used."""

    def between(self, begin_s: float, end_s: float) -> Seen:
        chosen = tuple(one for one in self.replies if begin_s <= one.ended_s < end_s)
        return Seen(replies=chosen, unsent=self.unsent, processor_s=self.processor_s)

    def with_status(self, status: int) -> list[Reply]:
        return [one for one in self.replies if one.status == status]

    @property
    def failed(self) -> int:
        return sum(one.status != 200 for one in self.replies)

    @property
    def per_second(self) -> float:
        """Answers of 200, from the first to the last."""
        ends = sorted(one.ended_s for one in self.with_status(200))
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def quantile_s(self, share: float) -> float:
        """Of the answers of 200."""
        times = sorted(one.took_s for one in self.with_status(200))
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")

    @property
    def longest_gap_s(self) -> float:
        ends = sorted(one.ended_s for one in self.with_status(200))
        return max((b - a for a, b in pairwise(ends)), default=float("nan"))


class Traffic:
    """Started in a process of its own, and read when it has ended."""

    def __init__(
        self,
        request: Request,
        *,
        port: int,
        folder: Path,
        connections: int,
        seconds: float,
        rate: float | None = None,
        models: Sequence[str] = (),
    ) -> None:
        self._trace = folder / f"trace-{time.monotonic_ns()}"
        body = self._trace.with_suffix(".body")
        body.write_bytes(request.on_the_wire(port))
        command = [
            *(sys.executable, "-m", "benchmarks.serving.load", str(body), str(self._trace)),
            *("--port", port, "--connections", connections, "--seconds", seconds),
            *(() if rate is None else ("--rate", rate)),
            *(() if not models else ("--models", ",".join(models))),
        ]
        self._process = subprocess.Popen([str(part) for part in command])

    def seen(self) -> Seen:
        """Waits for its end."""
        if self._process.wait() != 0:
            raise RuntimeError("the load generator has failed")
        first, *lines = self._trace.read_text().splitlines()
        facts = json.loads(first)
        return Seen(replies=tuple(Reply(*json.loads(line)) for line in lines), **facts)


class _Client:
    def __init__(self, options: argparse.Namespace) -> None:
        self._request: bytes = options.request.read_bytes()
        self._models = itertools.cycle(options.models.encode().split(b","))
        self.port, self.most, self.rate = options.port, options.connections, options.rate
        self.seconds = options.seconds
        self.running = True
        self.replies: list[Reply] = []
        self.idle: deque[_Connection] = deque()
        self.opened = self.open = 0
        self.unsent = 0
        self.under_way = 0

    @property
    def request(self) -> bytes:
        """The next request: for the next model, where models are named."""
        return self._request.replace(MODEL, next(self._models), 1)

    async def run(self) -> None:
        if self.rate is None:
            await asyncio.gather(*(self.connect() for _ in range(self.most)))
            await asyncio.sleep(self.seconds)
        else:
            await self._release()
        self.running = False
        deadline_s = time.monotonic() + 30  # those under way are waited for
        while self.under_way and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    async def _release(self) -> None:
        began_s, sent = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < self.seconds:
            while sent < passed_s * self.rate:
                sent += 1
                if self.idle:
                    self.idle.popleft().send()
                elif self.open < self.most:
                    await self.connect()
                else:
                    self.unsent += 1
            await asyncio.sleep(0.002)

    async def connect(self) -> None:
        self.opened += 1
        self.open += 1
        number = self.opened
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Connection(self, number), "127.0.0.1", self.port)

    def lost(self) -> None:
        self.open -= 1
        if self.running and self.rate is None:
            self._again = asyncio.get_running_loop().create_task(self.connect())


class _Connection(asyncio.Protocol):
    def __init__(self, client: _Client, number: int) -> None:
        self._client, self._number = client, number
        self._transport: Any = None
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.send()

    def send(self) -> None:
        import httptools

        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._waits = True
        self._client.under_way += 1
        self._began_s = time.monotonic()
        self._transport.write(self._client.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        found = VERSION.search(b"".join(self._body))
        self._note(self._parser.get_status_code(), int(found[1]) if found else 0)
        if not self._client.running or not self._parser.should_keep_alive():
            self._transport.close()
        elif self._client.rate is None:
            self.send()
        else:
            self._client.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waits:
            self._note(FAILED, 0)
        if self in self._client.idle:
            self._client.idle.remove(self)
        self._client.lost()

    def _note(self, status: int, version: int) -> None:
        self._waits = False
        self._client.under_way -= 1
        ended_s = time.monotonic()
        self._client.replies.append(Reply(self._number, self._began_s, ended_s, status, version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=Path, help="file of the request's bytes")
    parser.add_argument("trace", type=Path, help="where to write what was seen")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, help="requests a second, whatever the answers do")
    parser.add_argument("--models", default="", help="names for the path, one after the other")
    options = parser.parse_args()
    client = _Client(options)
    import uvloop

    uvloop.run(client.run())
    facts = {"unsent": client.unsent, "processor_s": time.process_time()}
    with options.trace.open("w") as file:
        print(json.dumps(facts), file=file)
        for one in client.replies:
            print(json.dumps(list(asdict(one).values())), file=file)


if __name__ == "__main__":
    main()
