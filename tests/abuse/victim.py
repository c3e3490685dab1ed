"""A server in a process of its own, what it takes of the machine, and a client that is light."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

COMMAND = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")
START_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def resident_bytes(self) -> int:
        return _status(self.process.pid, "VmRSS")

    def peak_bytes(self) -> int:
        """The most memory that the server had since `forget_peak`."""
        return _status(self.process.pid, "VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def decoders(self) -> list[int]:
        """The processes that decode large images."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for one in threads for pid in (one / "children").read_text().split()]

    def connect(self, sent: bytes = b"") -> socket.socket:
        address = urlsplit(self.url)
        connection = socket.create_connection((address.hostname, address.port), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(sent)
        return connection


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def serving(
    *arguments: str,
    environment: dict[str, str] | None = None,
    limits: dict[str, float] | None = None,
) -> Iterator[Victim]:
    """`limits`: fixed limits that are others than usual."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = subprocess.Popen(
            [*_command(limits or {}), "--port", "0", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "DNE_BACKEND": "torch",
                **(environment or {}),
            },
        )
        try:
            victim = Victim(url=_url(process), process=process, log=Path(log.name))
            _wait_until_ready(victim)
            yield victim
        finally:
            process.kill()
            process.communicate()


def _command(limits: dict[str, float]) -> tuple[str, ...]:
    *python, program = COMMAND
    limiting = f"FixedLimits.__init__.__kwdefaults__.update({limits!r})"
    return (*python, f"from dne_serve.settings import FixedLimits; {limiting}; {program}")


def _url(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("the server has no stdout")
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def _wait_until_ready(victim: Victim) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if httpx.get(f"{victim.url}/readyz").status_code == 200:
            return
        time.sleep(0.05)
    raise TimeoutError("the server is not ready")


class Client:
    """One connection, kept open and made anew when the server has closed it. Raw, because the
    client must not be what is measured, nor correct what is sent."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._connection: socket.socket | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def predict(self, image: bytes, *, kind: str = "image/png") -> Answer:
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        return self.send(f"{head}Content-Length: {len(image)}\r\n\r\n".encode() + image)

    def get(self, target: str, *, host: str = "localhost") -> Answer:
        return self.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))

    def send(self, request: bytes) -> Answer:
        began = time.monotonic()
        if self._connection is None:
            self._connection = self._victim.connect()
        self._connection.sendall(request)
        status, body, closes = _read_answer(self._connection)
        if closes:
            self.close()
        return Answer(status=status, body=body, seconds=time.monotonic() - began)


def _read_answer(connection: socket.socket) -> tuple[int, bytes, bool]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    headers = head.lower()
    length = int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += _some(connection)
    return int(head[9:12]), body, b"connection: close" in headers


def _some(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    if not part:
        raise ConnectionError("the server closed without an answer")
    return part


def detail(answer: Answer) -> Any:
    return json.loads(answer.body).get("detail")
