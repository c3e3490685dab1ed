"""How long one request may wait. One that has waited too long is refused, not served late: its
client has probably gone, and whoever comes next would wait for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from dne_serve.errors import WaitedTooLong

Answer = TypeVar("Answer")


ARRIVED = "dne_serve.arrived"
"""In the scope of a request: when its last byte was read, by the event loop's clock. Where more
is asked than can be done, requests wait for the event loop as well."""


class Patience:
    """Begins when it is made, on the event loop, or `since` an earlier moment by its clock."""

    def __init__(self, seconds: float, *, since: float | None = None) -> None:
        self._seconds = seconds
        began = asyncio.get_running_loop().time() if since is None else since
        self._until = began + seconds

    async def result(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What the coroutine returns; it is cancelled when the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._until):
                return await work
        # Not while it is handled: as a cause it would hold on to the frames of the work, and to the
        # images in them, until Python looks for cycles, which it seldom does.
        raise self._refusal()

    async def answers(self, tickets: Sequence[Future[Answer]]) -> list[Answer]:
        """In the order of the tickets. When the time is over, tickets that have not begun never
        will; those that have are waited for, as their work is done either way."""
        answers = [asyncio.wrap_future(ticket) for ticket in tickets]
        left_s = self._until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(answers, timeout=max(left_s, 0))
            withdrawn = [ticket.cancel() for ticket in tickets]
            if any(withdrawn):
                raise self._refusal()
            return [await answer for answer in answers]
        finally:
            for answer in answers:
                # Also when the request itself was cancelled. What is done is looked at, since
                # asyncio complains of failures that nobody has seen.
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()

    def _refusal(self) -> WaitedTooLong:
        return WaitedTooLong(f"the request has waited {self._seconds:g} s; try again soon")
