"""Send what the server does now to a few listeners, as server-sent events.

One task sums up the server for all listeners, and only while there is one. A listener gets the
members that have changed since its last event. A listener that is slow misses events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from dne_serve.errors import TooManyListeners

EVERY_S = 5.0
LOOK_S = 0.1
"""Time between two looks whether the server is about to stop: a stream must not delay it."""
MOST_LISTENERS = 16
SAME = b":\n\n"
"""A comment: nothing has changed, and the connection is alive."""

Facts = Mapping[str, Any]


class Stream:
    """The listeners of one server. Used on the event loop only."""

    def __init__(
        self,
        sum_up: Callable[[], Facts],
        *,
        ends: Callable[[], bool],
        every_s: float = EVERY_S,
        most: int = MOST_LISTENERS,
    ) -> None:
        self._sum_up = sum_up
        self._ends = ends
        self._every_s = every_s
        self._most = most
        self._listeners = 0
        self._next: asyncio.Future[Facts | None] | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def listeners(self) -> int:
        return self._listeners

    def check_room(self) -> None:
        """Raise TooManyListeners where no more listeners are taken."""
        if self._listeners >= self._most:
            raise TooManyListeners(
                f"{self._most} live views are open, and there may be no more; close one"
            )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events, the first one whole, until the server is about to stop."""
        self._listeners += 1
        try:
            if self._listeners > self._most:
                return  # several came at the same moment
            if self._ticking is None or self._ticking.done():
                self._next = asyncio.get_running_loop().create_future()
                self._ticking = asyncio.create_task(self._tick())
            known: Facts = {}
            facts: Facts | None = self._sum_up()
            while facts is not None and not self._ends():
                yield event(facts, known=known)
                known = facts
                assert self._next is not None  # it is there while the task ticks
                facts = await asyncio.shield(self._next)  # others wait for it too
        finally:
            self._listeners -= 1

    async def _tick(self) -> None:
        """Tell all listeners the facts, and None at the end. A failure reaches each of them."""
        while self._listeners:
            for _ in range(max(round(self._every_s / LOOK_S), 1)):
                await asyncio.sleep(min(LOOK_S, self._every_s))
                if self._ends():
                    break
            told, self._next = self._next, asyncio.get_running_loop().create_future()
            assert told is not None  # made before this task
            try:
                told.set_result(None if self._ends() else self._sum_up())
            except Exception as error:
                told.set_exception(error)
                told.exception()  # asyncio complains of failures that nobody has seen


def event(facts: Facts, *, known: Facts) -> bytes:
    """Write the members that differ from the known ones."""
    changed = {name: value for name, value in facts.items() if known.get(name, ...) != value}
    if not changed:
        return SAME
    text = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
