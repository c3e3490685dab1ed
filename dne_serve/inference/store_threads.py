"""Use the store on threads of its own. A store that hangs keeps only these threads busy: requests
are still read, and images decoded.

Work waits for its turn on the event loop, up to a deadline. Work whose client has gone is not
begun, and long work stops at the next `check_wanted`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect

from dne_serve.errors import Stopped, StoreBusy, WaitedTooLong

MAX_LOADS = 8
"""Versions that requests have named and that wait to be loaded, one at a time."""
IS_GONE = "dne_serve.is_gone"
"""Key in the scope of a request for a function that tells whether its client has gone."""
CLIENT_GONE: ContextVar[Callable[[], bool]] = ContextVar("client_gone", default=lambda: False)
"""That function, for the request under way. `ScopedRoute` sets it."""
_CHECK: ContextVar[Callable[[], None]] = ContextVar("check", default=lambda: None)

Result = TypeVar("Result")
Key = TypeVar("Key")
Loaded = TypeVar("Loaded")


def check_wanted() -> None:
    """Raise if the work on this thread is not wanted any more: its client has gone, or the server
    stops. Long work calls it where everything that it has written is whole."""
    _CHECK.get()()


class StoreThreads:
    """A pool of `threads` with a queue of `waiting` pieces of work, each of which waits at most
    `max_wait_s`; without it for as long as it takes. Used on the event loop."""

    def __init__(
        self, name: str, *, threads: int, waiting: int, max_wait_s: float | None = None
    ) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._turns = asyncio.Semaphore(threads)
        self._max_wait_s = max_wait_s
        self._most = threads + waiting
        self._stops = False
        self._queued = 0
        self._under_way: set[Future[Any]] = set()

    @property
    def count(self) -> int:
        """Count the pieces of work that wait or are under way."""
        return self._queued + len(self._under_way)

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Await the result of `work`. Work that is still queued at the deadline, or when its client
        has gone or the caller is cancelled, never begins."""
        if self.count >= self._most:
            raise StoreBusy(
                f"{self._most} requests wait for the store already, which is slow to answer; try "
                "again soon"
            )
        self._queued += 1
        try:
            turn = self._turns.acquire()
            await (turn if self._max_wait_s is None else Deadline(self._max_wait_s).result(turn))
        finally:
            self._queued -= 1
        return await asyncio.wrap_future(self._begin(work))

    def stop(self, *, wait: bool) -> None:
        """Begin no more work. Work under way ends by itself, or at its next `check_wanted`."""
        self._stops = True
        self._executor.shutdown(wait=wait, cancel_futures=True)

    def _begin(self, work: Callable[[], Result]) -> Future[Result]:
        def begin() -> Result:
            _CHECK.set(self._check)
            check_wanted()
            return work()

        if self._stops:
            self._turns.release()
            raise _stopped()
        loop = asyncio.get_running_loop()
        future = self._executor.submit(contextvars.copy_context().run, begin)
        self._under_way.add(future)
        future.add_done_callback(lambda done: self._ended(done, loop))
        return future

    def _ended(self, done: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._under_way.discard(done)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._turns.release)

    def _check(self) -> None:
        if self._stops:
            raise _stopped()
        if CLIENT_GONE.get()():
            raise ClientDisconnect


def _stopped() -> Stopped:
    return Stopped("the server stops before the request is done; ask another one")


class Loads(Generic[Key, Loaded]):
    """Loads of versions, or models, that requests name. Requests for the same one share one load. A
    load goes on when no request waits any more."""

    def __init__(
        self,
        load: Callable[[Key], Loaded],
        *,
        threads: int = 1,
        most: int = MAX_LOADS,
        what: str = "versions",
    ) -> None:
        self._load = load
        self._most, self._what = most, what
        self._executor = ThreadPoolExecutor(threads, "load")
        self._loading: dict[Key, Future[Loaded]] = {}

    async def get(self, key: Key, *, deadline: Deadline | None = None) -> Loaded:
        """Await what the key names, or raise WaitedTooLong at the deadline."""
        loading = self._loading.get(key) or self._begin(key)
        work = _outcome(loading)
        return await (work if deadline is None else deadline.result(work))

    def stop(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _begin(self, key: Key) -> Future[Loaded]:
        if len(self._loading) >= self._most:
            raise StoreBusy(f"{self._most} {self._what} wait to be loaded already; try again soon")
        loading = self._executor.submit(contextvars.copy_context().run, self._load, key)
        self._loading[key] = loading
        loading.add_done_callback(lambda done: self._forget(key, done))
        return loading

    def _forget(self, key: Key, done: Future[Loaded]) -> None:
        if self._loading.get(key) is done:
            del self._loading[key]


async def _outcome(work: Future[Result]) -> Result:
    """Await the result of the work, which goes on if the caller is cancelled."""
    outcome = asyncio.wrap_future(work)
    outcome.add_done_callback(_look_at)
    return await asyncio.shield(outcome)


def _look_at(outcome: asyncio.Future[Any]) -> None:
    """Read the outcome: asyncio complains of failures that no caller is left to see."""
    if not outcome.cancelled():
        outcome.exception()


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
