"""Inflate compressed request bodies piece by piece, and count their bytes.

A thousand bytes can inflate to a million, so the limit on a body counts the inflated bytes. A body
is inflated after all of it has arrived: an unfinished one takes only the memory of its own bytes.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.http.body_room import CLAIM, Claim

WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE_BYTES = 256 << 10
SLICE_BYTES = 64 << 10


class Inflated:
    """Middleware that hands plain bodies on. They take from the claim that `BodyLimit` has made."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = ""
        if scope["type"] == "http":
            coding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if coding in ("", "identity"):
            await self._app(scope, receive, send)
            return
        body = _Inflating(coding, receive, max_bytes=self._max_bytes, claim=scope[CLAIM])
        # In place: routing writes into this scope, and the outer middleware logs from it.
        scope["headers"] = _plain(scope["headers"])
        await self._app(scope, body.receive, send)


def _plain(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of the plain body, whose length is not known yet."""
    gone = (b"content-encoding", b"content-length", b"transfer-encoding")
    return [
        *(pair for pair in headers if pair[0] not in gone),
        (b"transfer-encoding", b"chunked"),
    ]


class _Inflating:
    """Inflation of one body. Refusals are HTTPExceptions: while it reads, FastAPI lets no others
    through."""

    def __init__(self, coding: str, receive: Receive, *, max_bytes: int, claim: Claim) -> None:
        self._coding = coding
        self._inflater = zlib.decompressobj(WINDOWS[coding]) if coding in WINDOWS else None
        self._receive = receive
        self._max_bytes = max_bytes
        self._claim = claim
        self._packed = bytearray()
        self._at = 0
        self._waiting = b""
        self._more = True
        self._made = 0

    async def receive(self) -> Message:
        if self._inflater is None:
            raise HTTPException(
                415,
                f"Content-Encoding {self._coding[:100]!r} is not accepted: send gzip or deflate",
                headers={"Accept-Encoding": "gzip, deflate"},
            )
        if self._inflater.eof:
            return await self._receive()  # which waits for the client to go
        while self._more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._packed += message.get("body", b"")
            self._more = message.get("more_body", False)
        await asyncio.sleep(0)  # others have their turn between two pieces
        piece = self._inflate(self._inflater)
        return {"type": "http.request", "body": piece, "more_body": not self._inflater.eof}

    def _inflate(self, inflater: zlib._Decompress) -> bytes:
        # In slices, because zlib copies all that it has not used yet, every time.
        if not self._waiting:
            self._waiting = bytes(self._packed[self._at : self._at + SLICE_BYTES])
            self._at += SLICE_BYTES
        try:
            piece = inflater.decompress(self._waiting, PIECE_BYTES)
        except zlib.error as error:
            raise HTTPException(400, f"the body is not {self._coding}") from error
        self._waiting = inflater.unconsumed_tail
        self._made += len(piece)
        if self._made > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
        self._claim.take(len(piece))
        self._check_end(inflater, is_full=len(piece) == PIECE_BYTES)
        return piece

    def _check_end(self, inflater: zlib._Decompress, *, is_full: bool) -> None:
        is_all = not self._waiting and self._at >= len(self._packed)
        if inflater.unused_data or (inflater.eof and not is_all):
            raise HTTPException(400, f"the body goes on after its {self._coding} has ended")
        # A full piece may have left something inside zlib, which comes out for the asking.
        if is_all and not is_full and not inflater.eof:
            raise HTTPException(400, f"the {self._coding} of the body ends too early")
