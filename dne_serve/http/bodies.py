"""Limit the body of each request, inflate compressed bodies, and share the memory for bodies among
all requests. Used on the event loop only.

A route says which kind of body it takes. It takes at most 64 KiB unless it says otherwise.

A client that sends most of a body and withholds the rest would hold its share for as long as a body
may take. So the body that has stalled for longest makes room for others. A part of the memory is
kept for small bodies, which get in while large ones wait for the engine.

A thousand bytes can inflate to a million, so the limit on a body counts the inflated bytes. A body
is inflated after all of it has arrived: an unfinished one takes only the memory of its own bytes.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.errors import Malformed, TooLarge

RESERVATION = "dne.reservation"
"""Key of an ASGI scope: the reservation of the request's body."""
_RESERVED = 4  # a quarter of the room is for small bodies
SMALL = 128  # a body that takes up to that part of the room: 4 MiB of 512 MiB
_FREED_BYTES = 128 << 20
"""Bytes of large bodies, after which freed memory goes back to the system. The C library keeps what
a thread has freed for that thread: after many bodies this was more than a gigabyte."""
STALLED_S = 1.0
STEP_BYTES = 64 << 10
"""Bytes that have to arrive within `STALLED_S`: a body that drips single bytes is stalled."""
PIECE_BYTES = 64
"""Memory that Python takes for a piece of a body besides its bytes."""
DECLARED = "dne.declared"
"""Key of an ASGI scope: the length that the client has announced. The server's own connections set
it, and Ray's do not."""
SMALL_BYTES = 64 << 10
AT_ONCE_BYTES = 32 << 10
"""A body up to this size is parsed on the event loop: a trip to a thread would take longer."""
DIGIT = re.compile(rb"[0-9]")
DIGITS = 200
"""To parse a number takes time that grows with the square of its digits."""


def declared_bytes(scope: Scope) -> int:
    """Return the length of the body that the client has announced; 0 if it has announced none."""
    if DECLARED in scope:
        return int(scope[DECLARED])
    text = Headers(scope=scope).get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def check_json(text: bytes, *, max_values: int) -> None:
    """Refuse a JSON text that would take long to parse, before it is parsed: raise TooLarge for too
    many values, and Malformed for a number of more than 400 digits."""
    # Every value but the first comes after one of these marks, which a string may hold too.
    if sum(map(text.count, (b",", b"[", b"{"))) > max_values:
        raise TooLarge(f"the JSON holds more than {max_values} values")
    # A run of twice as many digits has a digit at one of these places, and as many after it.
    for digit in DIGIT.finditer(text[::DIGITS]):
        if text[digit.start() * DIGITS : (digit.start() + 1) * DIGITS].isdigit():
            raise Malformed(f"a number is too large: it has more than {DIGITS} digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyKind:
    """A kind of body with its limits, which count after decompression. `max_bytes` is None for
    bodies that only `--max-body-bytes` limits."""

    max_bytes: int | None
    max_json_values: int = 100_000
    """A value takes tens of bytes in memory, and half a microsecond."""

    def most_bytes(self, setting: int) -> int:
        """Return the limit on a server with this `--max-body-bytes`."""
        return setting if self.max_bytes is None else min(self.max_bytes, setting)

    def described(self, *, like: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the status 413 of a route for OpenAPI, in the form of another refusal."""
        most = "--max-body-bytes" if self.max_bytes is None else f"{self.max_bytes:,} bytes"
        return {**like, "description": f"{HTTPStatus(413).phrase}: a body has at most {most}"}


SMALL_BODY = BodyKind(max_bytes=SMALL_BYTES)
"""The kind of every route that does not say otherwise: all of its text fields are short."""
IMAGES = BodyKind(max_bytes=None)


class MemoryBudget:
    """Memory for all bodies together."""

    def __init__(
        self,
        max_bytes: int,
        *,
        max_body_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_freed` is called after `_FREED_BYTES` of large bodies were let go of."""
        self._max_bytes = max_bytes
        # One body of the largest size gets in, however small the room is.
        self._for_large = max_bytes - max(
            0, min(max_bytes // _RESERVED, max_bytes - max_body_bytes)
        )
        self._clock = clock
        self._on_freed = on_freed
        self._freed = 0
        self._used = 0
        self._reservations: set[Reservation] = set()

    def reservation(self, address: str) -> Reservation:
        """Make a reservation for one body. The caller lets go of it at the end."""
        reservation = Reservation(budget=self, address=address)
        self._reservations.add(reservation)
        return reservation

    def take(self, reservation: Reservation, count: int) -> None:
        """Give bytes to a reservation. Raise HTTPException if there is no room, even after all
        stalled bodies were let go."""
        total = reservation.held + count
        most = self._max_bytes if total <= self._max_bytes // SMALL else self._for_large
        while total <= most < self._used + count and (slow := self._slowest(besides=reservation)):
            self.let_go(slow)
            slow.evict()
        if self._used + count > most:
            raise _refusal("the bodies of all requests together are too much")
        self._used += count
        reservation.grow(count, now=self._clock())

    def let_go(self, reservation: Reservation) -> None:
        freed, reservation.held = reservation.held, 0
        self._used -= freed
        self._reservations.discard(reservation)
        if freed > self._max_bytes // SMALL:
            self._freed += freed
        if self._freed >= _FREED_BYTES:
            self._freed = 0
            self._on_freed()

    def _slowest(self, *, besides: Reservation) -> Reservation | None:
        """Find the longest stalled body of the address whose stalled bodies take most.

        A client that is slow without malice stays while another one holds more.
        """
        before = self._clock() - STALLED_S
        others = (body for body in self._reservations if body is not besides)
        stalled = [body for body in others if body.has_stalled(before)]
        held: Counter[str] = Counter()
        for body in stalled:
            held[body.address] += body.held
        return max(stalled, key=lambda body: (held[body.address], -body.moved_at), default=None)


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """Bytes that the body of one request takes, in all forms in which it is in memory."""

    budget: MemoryBudget
    address: str
    held: int = 0
    moved_at: float = 0.0
    declared: int = 0
    """Bytes that the client has announced."""
    max_bytes: int = SMALL_BYTES
    """Bytes that the body may have, as it arrives and inflated. The route sets it."""
    is_refused: bool = False
    """True when the rest of the body is not wanted."""
    is_finished: bool = False
    """True when the client has sent all of the body and waits for the server."""
    on_evicted: Callable[[], None] | None = field(default=None, repr=False)
    _is_evicted: bool = False
    _step: int = 0

    def limit(self, max_bytes: int) -> None:
        """Set the limit of the route. Raise HTTPException for a body that announces more."""
        self.max_bytes = max_bytes
        self.check_size(self.declared)

    def check_size(self, count: int) -> None:
        if count > self.max_bytes:
            self.is_refused = True
            # Not a DneError: while it reads a JSON body, FastAPI lets only its own kind through.
            raise HTTPException(
                413, f"the body has more than {self.max_bytes} bytes, the limit of this route"
            )

    def take(self, count: int) -> None:
        self.check()
        self.budget.take(self, count)

    def check(self) -> None:
        if self._is_evicted:
            raise _refusal("the body has stalled, and others needed its room: send it again")

    def let_go(self) -> None:
        self.budget.let_go(self)

    def grow(self, count: int, *, now: float) -> None:
        self._step += count
        if self.held == 0 or self._step >= STEP_BYTES:
            self.moved_at, self._step = now, 0
        self.held += count

    def has_stalled(self, before: float) -> bool:
        return self.held > 0 and not self.is_finished and self.moved_at <= before

    def evict(self) -> None:
        self._is_evicted = True
        if self.on_evicted is not None:
            self.on_evicted()


def _refusal(detail: str) -> HTTPException:
    # Not a DneError: while it reads a JSON body, FastAPI lets only its own kind through.
    return HTTPException(503, detail, headers={"Retry-After": "1"})


WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_INFLATED_BYTES = 256 << 10
_SLICE_BYTES = 64 << 10


class Inflated:
    """Middleware that hands plain bodies on. They take from the reservation that `BodyLimit` has
    made, and have the same limit as the bytes on the wire."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = ""
        if scope["type"] == "http":
            coding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if coding in ("", "identity"):
            await self._app(scope, receive, send)
            return
        body = _Inflating(coding, receive, reservation=scope[RESERVATION])
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

    def __init__(self, coding: str, receive: Receive, *, reservation: Reservation) -> None:
        self._coding = coding
        self._inflater = zlib.decompressobj(WINDOWS[coding]) if coding in WINDOWS else None
        self._receive = receive
        self._reservation = reservation
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
            self._waiting = bytes(self._packed[self._at : self._at + _SLICE_BYTES])
            self._at += _SLICE_BYTES
        # No more than one byte over the limit is made.
        most = min(_INFLATED_BYTES, self._reservation.max_bytes - self._made + 1)
        try:
            piece = inflater.decompress(self._waiting, most)
        except zlib.error as error:
            raise HTTPException(400, f"the body is not {self._coding}") from error
        self._waiting = inflater.unconsumed_tail
        self._made += len(piece)
        self._reservation.check_size(self._made)
        self._reservation.take(len(piece))
        self._check_end(inflater, is_full=len(piece) == most)
        return piece

    def _check_end(self, inflater: zlib._Decompress, *, is_full: bool) -> None:
        is_all = not self._waiting and self._at >= len(self._packed)
        if inflater.unused_data or (inflater.eof and not is_all):
            raise HTTPException(400, f"the body goes on after its {self._coding} has ended")
        # A full piece may have left something inside zlib, which another call returns.
        if is_all and not is_full and not inflater.eof:
            raise HTTPException(400, f"the {self._coding} of the body ends too early")
