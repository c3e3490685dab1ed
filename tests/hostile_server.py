"""A server that answers any request with bytes of a test's choice, at a pace of its choice."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PIECE = 64 << 10


@dataclass(slots=True)
class HostileServer:
    """`pieces` are sent to every client, with `wait_s` between two of them."""

    pieces: Iterable[bytes]
    wait_s: float = 0.0
    sent: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def serve(self, listener: socket.socket) -> None:
        while not self.ended.is_set():
            with contextlib.suppress(OSError):
                client, _ = listener.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(60)
            _take_request(client)
            for piece in self.pieces:
                client.sendall(piece)
                self.sent += len(piece)
                if self.ended.wait(self.wait_s):
                    return


def _take_request(client: socket.socket) -> None:
    """Read a request, as far as its body is announced."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(PIECE)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0].split(b":")[1]) - len(body) if lengths else 0
    while left > 0:
        left -= len(client.recv(PIECE))


@contextlib.contextmanager
def hostile(pieces: Iterable[bytes], *, wait_s: float = 0.0) -> Iterator[HostileServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        server = HostileServer(pieces, wait_s=wait_s)
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.serve, args=(listener,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            thread.join()


def head(*lines: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return "\r\n".join(
        [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *lines, "Connection: close", "", ""]
    ).encode()


def packed(size: int, *, layers: int) -> bytes:
    """Pack white space before an empty object, in layers of gzip."""
    packer = zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(b" " * PIECE) for _ in range(size // PIECE)]
    data = b"".join((*pieces, packer.compress(b"{}"), packer.flush()))
    for _ in range(layers - 1):
        data = zlib.compress(data, 9, wbits=31)
    return data


class Endless:
    """One piece again and again, for as long as somebody reads it."""

    def __init__(self, first: bytes, then: bytes) -> None:
        self._first, self._then = first, then

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        while True:
            yield self._then


def answers(size: int) -> dict[str, tuple[Iterable[bytes], float]]:
    """Name the answers that never end, or unpack to about `size`, and the wait between pieces."""
    one, two = packed(size, layers=1), packed(size, layers=2)
    deep = b"[" * 200_000 + b"]" * 200_000
    wide = b"[" + b"[]," * (size // 96) + b"0]"
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    return {
        "gzip bomb": ([head("Content-Encoding: gzip", f"Content-Length: {len(one)}"), one], 0),
        "nested gzip": (
            [head("Content-Encoding: gzip, gzip", f"Content-Length: {len(two)}"), two],
            0,
        ),
        "endless body": (Endless(head("Transfer-Encoding: chunked"), chunk), 0),
        "dripping body": (Endless(head("Transfer-Encoding: chunked"), b"1\r\n \r\n"), 0.1),
        "dripping header": (Endless(b"HTTP/1.1 200 OK\r\nX: ", b"x"), 0.1),
        "endless headers": (Endless(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 1000 + b"\r\n"), 0),
        "endless interim answers": (Endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), 0.01),
        "deep JSON": ([head(f"Content-Length: {len(deep)}"), deep], 0),
        "wide JSON": ([head(f"Content-Length: {len(wide)}"), wide], 0),
        "not gzip": ([head("Content-Encoding: gzip", "Content-Length: 2"), b"{}"], 0),
        "brotli": ([head("Content-Encoding: br", "Content-Length: 2"), b"{}"], 0),
        "redirect to a mailbox": ([head("Location: mailto:a@b", status="302 Found")], 0),
        "redirect to a port": ([head("Location: http://a:x/", status="302 Found")], 0),
        "not HTTP": ([b"SSH-2.0-OpenSSH\r\n"], 0),
        "nothing": ([], 0),
        "not UTF-8": ([head("Content-Length: 4"), b'"\xff\xfe"'], 0),
    }


def wait_until_quiet(server: HostileServer) -> None:
    """Wait until nobody reads the server any more."""
    before = -1
    while server.sent != before:
        before = server.sent
        time.sleep(0.3)


def nasty_values() -> list[object]:
    """List values that a field may have instead of its own."""
    return [
        None,
        True,
        -1,
        10**30,
        1e308,
        1e999,
        float("nan"),
        "x",
        "\ud800",
        "\x1b[2J",
        [],
        [[]],
        {},
        0.5,
    ]


def dumped(found: object) -> bytes:
    """Write JSON as no honest server does, with NaN and Infinity."""
    return json.dumps(found).encode()
