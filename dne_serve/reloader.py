"""Follows a channel: when its head moves, loads the target and swaps it in.

Requests under way keep the version they began with. A load that fails changes nothing: the old
version goes on being served, the reason is visible, and the load is tried again with backoff.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dne_serve.residents import Residents
from model_store.channel import ChannelRecord
from model_store.errors import DneError, StoreNotFound
from model_store.manifest import Manifest, ShardRef

MAX_BACKOFF_S = 30.0
NICENESS = 5
"""Of the thread that loads: with it p99 during changes was 1.19 of before, without it 1.41."""

log = logging.getLogger("dne_serve.reloader")


class ChannelReader(Protocol):
    """The part of a store that following a channel needs."""

    def head(self, channel: str) -> ChannelRecord | None: ...
    def resolve(self, record: ChannelRecord) -> Manifest: ...
    def read_shard(self, ref: ShardRef) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the channel's head is not served. `record` is None when the store cannot be read."""

    record: ChannelRecord | None
    error: Exception
    times: int
    retry_at: float


class Reloader:
    def __init__(
        self,
        open_store: Callable[[], ChannelReader],
        *,
        residents: Residents,
        channel: str,
        poll_s: float,
        beside: Callable[[], None] = lambda: None,
        on_swap: Callable[[int], None] = lambda version: None,
        on_failed_load: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beside` is called after each look at the channel, for versions that stand beside the
        served one."""
        self._open_store = open_store
        self._residents = residents
        self._channel = channel
        self._poll_s = poll_s
        self._beside = beside
        self._on_swap = on_swap
        self._on_failed_load = on_failed_load
        self._clock = clock
        self._following = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reloader", daemon=True)
        self.record: ChannelRecord | None = None
        """The channel record that is served."""
        self.failure: Failure | None = None
        self.withdrawn = False
        """Whether nothing is served on purpose, whatever the channel names."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def poll(self) -> None:
        """One look at the channel. Whatever is in the way ends up in `failure`."""
        with self._following:
            if self.withdrawn:
                return
            try:
                self._follow(patient=True)
            except Exception as error:  # a loop that ends would leave the server deaf for ever
                log.debug("cannot follow channel %s", self._channel, exc_info=error)

    def follow(self) -> ChannelRecord | None:
        """Serves what the channel names now, or raises what is in the way."""
        with self._following:
            self.withdrawn = False
            self._follow(patient=False)
            return self.record

    def withdraw(self) -> None:
        """Serves nothing until `follow`. Requests under way keep the version they began with."""
        with self._following:
            self.withdrawn = True
            self.record = None
            self._residents.clear()

    def _loop(self) -> None:
        _step_back()
        while not self._stop.is_set():
            self.poll()
            self._care()
            self._stop.wait(self._poll_s)

    def _care(self) -> None:
        """The served version comes first; then those beside it, and those that may leave."""
        try:
            if self._residents.served is not None:
                self._beside()
            self._residents.sweep()
        except Exception as error:  # it is tried again, and the loop must not end
            log.error("the versions in memory could not be cared for: %s", error, exc_info=error)

    def _follow(self, *, patient: bool) -> None:
        head: ChannelRecord | None = None
        try:
            store = self._open_store()
            head = store.head(self._channel)
            if head is None or head == self.record:
                self.failure = None
                return
            if patient and self._should_wait(head):
                return
            self._swap(head, store)
        except Exception as error:
            self._remember(head, error)
            raise
        self.failure = None

    def _swap(self, head: ChannelRecord, store: ChannelReader) -> None:
        before = self._residents.served
        resident = self._residents.find(head.target_digest)
        if resident is None:
            resident = self._residents.load(store.resolve(head), shards=store, needed=True)
        self._residents.serve(resident)
        self.record = head
        if before is not resident:
            self._on_swap(resident.version)
            log.info(
                "serving version %s (%s, record %s)", resident.version, self._channel, head.number
            )

    def _should_wait(self, head: ChannelRecord) -> bool:
        failure = self.failure
        return failure is not None and failure.record == head and self._clock() < failure.retry_at

    def _remember(self, head: ChannelRecord | None, error: Exception) -> None:
        last = self.failure
        again = last is not None and last.record == head
        times = last.times + 1 if last and again else 1
        wait_s = min(MAX_BACKOFF_S, self._poll_s * 2 ** min(times, 16))
        self.failure = Failure(
            record=head, error=error, times=times, retry_at=self._clock() + wait_s
        )
        if head is not None:
            self._on_failed_load()
        if not last or not again or str(last.error) != str(error):
            _say(self._channel, head, error)


def _say(channel: str, head: ChannelRecord | None, error: Exception) -> None:
    """One line the first time; a stack trace only for what nobody foresaw."""
    unforeseen = None if isinstance(error, DneError | OSError) else error
    if isinstance(error, StoreNotFound):
        log.info("waiting for the store: %s", error)
    elif head is None:
        log.warning("cannot read channel %s: %s", channel, error, exc_info=unforeseen)
    else:
        log.error("cannot load version %s: %s", head.target, error, exc_info=unforeseen)


def _step_back() -> None:
    """What loads a version gives way to what answers. On Linux each thread has a priority."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)
    except OSError as error:  # a sandbox may forbid it, and versions are served all the same
        log.warning("the thread that loads versions keeps its priority: %s", error)
