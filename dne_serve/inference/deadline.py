"""Limit the time that one request may wait. A request that has waited too long is refused: its
client has probably gone, and the next request would wait for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from dne_serve.errors import WaitedTooLong

Answer = TypeVar("Answer")


ARRIVED = "dne_serve.arrived"
"""Key in the scope of a request for the time its last byte was read, by the event loop's clock.
Under overload, requests wait for the event loop as well."""


class Deadline:
    """A moment so many seconds after the deadline is made, or after `since`, an earlier moment by
    the event loop's clock."""

    def __init__(self, seconds: float, *, since: float | None = None) -> None:
        self._seconds = seconds
        began = asyncio.get_running_loop().time() if since is None else since
        self._at = began + seconds

    async def result(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Await the coroutine, and cancel it at the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._at):
                return await work
        # Raised after the `with`: a TimeoutError as its cause would keep the frames of the work,
        # and the images in them, until Python looks for cycles, which it seldom does.
        raise self._refusal()

    async def answers(self, tickets: Sequence[Future[Answer]]) -> list[Answer]:
        """Await the answers in the order of the tickets. At the deadline, cancel the tickets that
        have not begun. Tickets that have begun are waited for, as their work is done either way."""
        answers = [asyncio.wrap_future(ticket) for ticket in tickets]
        left_s = self._at - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(answers, timeout=max(left_s, 0))
            withdrawn = [ticket.cancel() for ticket in tickets]
            if any(withdrawn):
                raise self._refusal()
            return [await answer for answer in answers]
        finally:
            for answer in answers:
                # Also when the request itself was cancelled. Read the outcome of each answer:
                # asyncio complains of failures that nobody has seen.
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()

    def _refusal(self) -> WaitedTooLong:
        return WaitedTooLong(f"the request has waited {self._seconds:g} s; try again soon")
