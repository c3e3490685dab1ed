"""Request bodies that travel compressed: inflated piece by piece, and counted while they are.

A thousand bytes can say a million zeros, so the limit on a body is one on what comes out.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.edge import Room

WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE_BYTES = 256 << 10


class Inflated:
    """What is inside sees plain bodies."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, room: Room) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = ""
        if scope["type"] == "http":
            coding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if coding in ("", "identity"):
            await self._app(scope, receive, send)
            return
        body = _Inflating(coding, receive, max_bytes=self._max_bytes, room=self._room)
        # In place: what is outside counts and logs by what routing leaves in the same scope.
        scope["headers"] = _plain(scope["headers"])
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.let_go()


def _plain(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of the plain body: nobody knows yet how long it is."""
    gone = (b"content-encoding", b"content-length", b"transfer-encoding")
    return [
        *(pair for pair in headers if pair[0] not in gone),
        (b"transfer-encoding", b"chunked"),
    ]


class _Inflating:
    """One body. Refusals are HTTPExceptions: FastAPI lets only these through while it reads."""

    def __init__(self, coding: str, receive: Receive, *, max_bytes: int, room: Room) -> None:
        self._coding = coding
        self._inflater = zlib.decompressobj(WINDOWS[coding]) if coding in WINDOWS else None
        self._receive = receive
        self._max_bytes = max_bytes
        self._waiting = b""
        self._more = True
        self._made = 0
        self._room = room

    async def receive(self) -> Message:
        if self._inflater is None:
            raise HTTPException(
                415,
                f"Content-Encoding {self._coding[:100]!r} is not accepted: send gzip or deflate",
                headers={"Accept-Encoding": "gzip, deflate"},
            )
        if not self._waiting and self._more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting, self._more = message.get("body", b""), message.get("more_body", False)
        else:
            await asyncio.sleep(0)  # others have their turn between two pieces
        piece = self._inflate(self._inflater)
        return {"type": "http.request", "body": piece, "more_body": self._is_unfinished()}

    def _inflate(self, inflater: zlib._Decompress) -> bytes:
        try:
            piece = inflater.decompress(self._waiting, PIECE_BYTES)
        except zlib.error as error:
            raise HTTPException(400, f"the body is not {self._coding}") from error
        self._waiting = inflater.unconsumed_tail
        self._made += len(piece)
        self._room.take(len(piece))
        if self._made > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
        if inflater.unused_data:
            raise HTTPException(400, f"the body goes on after its {self._coding} has ended")
        # A full piece may have left something inside zlib, which comes out for the asking.
        is_all = not self._more and not self._waiting and len(piece) < PIECE_BYTES
        if is_all and not inflater.eof:
            raise HTTPException(400, f"the {self._coding} of the body ends too early")
        return piece

    def let_go(self) -> None:
        self._room.give_back(self._made)
        self._made = 0

    def _is_unfinished(self) -> bool:
        return self._more or bool(self._waiting) or not (self._inflater and self._inflater.eof)
