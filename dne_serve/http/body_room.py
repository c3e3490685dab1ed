"""Share the memory for bodies among all requests. Used on the event loop only.

A client that sends most of a body and withholds the rest would hold its share for as long as a body
may take. So the body that has stalled for longest makes room for others. A part of the room is kept
for small bodies, which get in while large ones wait for the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException

CLAIM = "dne.claim"
"""Key of an ASGI scope: the claim of the request's body."""
RESERVED = 4  # a quarter of the room is for small bodies
SMALL = 128  # a body that takes up to that part of the room: 4 MiB of 512 MiB
STALLED_S = 1.0
STEP_BYTES = 64 << 10
"""Bytes that have to arrive within `STALLED_S`: a body that drips single bytes is stalled."""
PIECE_BYTES = 64
"""Memory that Python takes for a piece of a body besides its bytes."""


class Room:
    """Memory for all bodies together."""

    def __init__(
        self,
        max_bytes: int,
        *,
        max_body_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        # One body of the largest size gets in, however small the room is.
        self._for_large = max_bytes - max(0, min(max_bytes // RESERVED, max_bytes - max_body_bytes))
        self._clock = clock
        self._used = 0
        self._claims: set[Claim] = set()

    def claim(self, address: str) -> Claim:
        """Make a claim for one body. The caller lets go of it at the end."""
        claim = Claim(room=self, address=address)
        self._claims.add(claim)
        return claim

    def take(self, claim: Claim, count: int) -> None:
        """Give bytes to a claim. Raise HTTPException if there is no room, even after all stalled
        bodies were let go."""
        total = claim.held + count
        most = self._max_bytes if total <= self._max_bytes // SMALL else self._for_large
        while total <= most < self._used + count and (slow := self._slowest(besides=claim)):
            self.let_go(slow)
            slow.evict()
        if self._used + count > most:
            raise _refusal("the bodies of all requests together are too much")
        self._used += count
        claim.grow(count, now=self._clock())

    def let_go(self, claim: Claim) -> None:
        self._used -= claim.held
        claim.held = 0
        self._claims.discard(claim)

    def _slowest(self, *, besides: Claim) -> Claim | None:
        """Find the longest stalled body of the address whose stalled bodies take most.

        A client that is slow without malice stays while another one holds more.
        """
        before = self._clock() - STALLED_S
        stalled = [one for one in self._claims if one.has_stalled(before) and one is not besides]
        held: Counter[str] = Counter()
        for one in stalled:
            held[one.address] += one.held
        return max(stalled, key=lambda one: (held[one.address], -one.moved_at), default=None)


@dataclass(slots=True, eq=False, kw_only=True)
class Claim:
    """Bytes that the body of one request takes, in all forms in which it is in memory."""

    room: Room
    address: str
    held: int = 0
    moved_at: float = 0.0
    is_finished: bool = False
    """True when the client has sent all of the body and waits for the server."""
    on_evicted: Callable[[], None] | None = field(default=None, repr=False)
    _is_evicted: bool = False
    _step: int = 0

    def take(self, count: int) -> None:
        self.check()
        self.room.take(self, count)

    def check(self) -> None:
        if self._is_evicted:
            raise _refusal("the body has stalled, and others needed its room: send it again")

    def let_go(self) -> None:
        self.room.let_go(self)

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
