"""Read the store on threads of its own. A store that hangs keeps only these threads busy: requests
are still read, and images decoded."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dne_serve.engines.base import Resident
from dne_serve.errors import StoreBusy
from dne_serve.inference.deadline import Deadline

MAX_LOADS = 8
"""Versions that requests have named and that wait to be loaded, one at a time."""

Result = TypeVar("Result")


class StoreThreads:
    """A pool of `threads` with a queue of `waiting` pieces of work. Used on the event loop."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._most = threads + waiting
        self._under_way: set[Future[Any]] = set()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Await the result of `work`. If the caller is cancelled first, the work never begins."""
        return await asyncio.wrap_future(self.begin(work))

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        if len(self._under_way) >= self._most:
            raise StoreBusy(
                f"{self._most} requests wait for the store already, which is slow to answer; try "
                "again soon"
            )
        future = self._executor.submit(contextvars.copy_context().run, work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def stop(self, *, wait: bool) -> None:
        """Begin no more work. Work under way ends by itself."""
        self._executor.shutdown(wait=wait, cancel_futures=True)


class Loads:
    """Loads of versions that requests name. Requests for the same version share one load. A load
    goes on when no request waits any more."""

    def __init__(self, load: Callable[[int], Resident]) -> None:
        self._load = load
        self._threads = StoreThreads("load", threads=1, waiting=MAX_LOADS - 1)
        self._loading: dict[int, Future[Resident]] = {}

    async def get(self, version: int, *, deadline: Deadline | None = None) -> Resident:
        """Await the version, or raise WaitedTooLong at the deadline."""
        loading = self._loading.get(version)
        if loading is None:
            loading = self._threads.begin(lambda: self._load(version))
            self._loading[version] = loading
            loading.add_done_callback(lambda done: self._forget(version, done))
        work = _outcome(loading)
        return await (work if deadline is None else deadline.result(work))

    def stop(self) -> None:
        self._threads.stop(wait=True)

    def _forget(self, version: int, done: Future[Resident]) -> None:
        if self._loading.get(version) is done:
            del self._loading[version]


async def _outcome(work: Future[Result]) -> Result:
    """Await the result of the work, which goes on if the caller is cancelled."""
    outcome = asyncio.wrap_future(work)
    outcome.add_done_callback(_look_at)
    return await asyncio.shield(outcome)


def _look_at(outcome: asyncio.Future[Any]) -> None:
    """Read the outcome: asyncio complains of failures that no caller is left to see."""
    if not outcome.cancelled():
        outcome.exception()
