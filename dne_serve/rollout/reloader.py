"""Follow a channel: when its head moves, load the target and swap it in, at once or at the record's
moment.

Requests under way keep their version. A load that fails changes nothing and is tried again with
backoff. A server that has just started falls back to the newest earlier version that loads.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dne_serve.engines.base import Resident
from dne_serve.errors import public_message
from dne_serve.observe.events import SwapTraces, Times
from dne_serve.rollout.channel import (
    check_onward,
    earlier_records,
    earlier_targets,
)
from dne_serve.rollout.cutover import ScheduledCutover
from dne_serve.rollout.loaded_versions import LoadedVersions
from model_store.errors import DneError, StoreError, StoreNotFound
from model_store.records.channel import ChannelRecord
from model_store.store.store import Store

_MAX_BACKOFF_S = 30.0
NEXT_POLLS = 30
"""Polls that only ask for the next record, between two that look at the whole channel."""
LEAST_WAIT = 0.75
"""The least share of the poll time between two polls: a fleet must not ask in step."""
NICENESS = 5
"""Added to the loading thread. During swaps p99 was 1.19 times the usual, and 1.41 without it."""

log = logging.getLogger("dne_serve.reloader")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The reason why the channel's head is not served. `record` is None if the store cannot be
    read."""

    record: ChannelRecord | None
    error: Exception
    times: int
    retry_at: float


class Reloader:
    """A thread that keeps the served version at the channel's head."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        loaded: LoadedVersions,
        channel: str,
        poll_s: float,
        settle_s: float = 0.0,
        beside: Callable[[], None] = lambda: None,
        on_swap: Callable[[int], None] = lambda version: None,
        on_failed_load: Callable[[], None] = lambda: None,
        traces: SwapTraces | None = None,
        model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Call `beside` after each look at the channel, to load the canary and the shadow. The log
        names the `model`, where there are many."""
        self._open_store = open_store
        self._loaded = loaded
        self._channel = channel
        self._told = channel if model is None else f"{channel} of model {model}"
        self._poll_s = poll_s
        self._beside = beside
        self._on_swap = on_swap
        self._on_failed_load = on_failed_load
        self._traces = traces
        self._clock = clock
        self.cutover = ScheduledCutover(
            self._serve, keeper=loaded, settle_s=settle_s, clock=clock, wall=wall
        )
        self._fall_back_at = 0.0
        self._followed: Store | None = None
        self._next_polls_left = 0
        self._jitter = random.Random()
        self._following = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reloader", daemon=True)
        self.record: ChannelRecord | None = None
        """The channel record that is served."""
        self.head: ChannelRecord | None = None
        """The newest record that was seen, whether its version is served or not."""
        self.fallback = False
        """Whether an earlier version is served, as the head could not be loaded at the start."""
        self.failure: _Failure | None = None
        self.withdrawn = False
        """Whether nothing is served on purpose, whatever the channel names."""

    def start(self, *, polls: bool = True) -> None:
        """Follow the channel on a thread of its own; without `polls`, whenever `look` is called."""
        if polls:
            self._thread.start()
        self.cutover.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.cutover.stop()

    def look(self) -> None:
        """Follow the channel once, and look after the versions in memory."""
        self.poll()
        self._care()

    def poll(self) -> None:
        """Look at the channel once. An error ends up in `failure`."""
        with self._following:
            if self.withdrawn:
                return
            try:
                if not self._poll_next():
                    self._follow(asked=False)
            except Exception as error:  # a loop that ends would leave the server deaf for ever
                log.debug("cannot follow channel %s", self._told, exc_info=error)

    def follow(self, *, in_memory: Resident | None = None) -> ChannelRecord | None:
        """Take up the version that the channel names, or raise the error that prevents it.
        `in_memory` is a version that may have left the loaded versions meanwhile."""
        with self._following:
            self.withdrawn = False
            self._follow(asked=True, in_memory=in_memory)
            return self.record

    def withdraw(self) -> None:
        """Serve nothing until `follow`. Requests under way keep the version they began with."""
        with self._following:
            self.withdrawn = True
            self.cutover.clear()
            self.record, self.fallback = None, False
            self._loaded.clear()

    def _loop(self) -> None:
        step_back()
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._poll_s * self._jitter.uniform(LEAST_WAIT, 1))

    def _care(self) -> None:
        """Load the versions beside the served one, and let go of those that may leave."""
        try:
            if self._loaded.served is not None:
                self._beside()
            self._loaded.sweep()
        except Exception as error:  # it is tried again, and the loop must not end
            log.error(
                "versions in memory could not be loaded or released: %s", error, exc_info=error
            )

    def _poll_next(self) -> bool:
        """Return True if the head is taken up and no record follows it. This takes one request of
        the store, where a look at the channel takes three. A store that has vanished, was replaced
        or has lost records is found by the next look."""
        head = self.head
        if head is None or head != self._newest or self.failure is not None or self.fallback:
            return False
        if self._followed is None or not self._next_polls_left:
            return False
        self._next_polls_left -= 1
        try:
            return not self._followed.has_record(self._channel, head.number + 1)
        except StoreError:
            return False  # the look that follows says what is wrong

    def _follow(self, *, asked: bool, in_memory: Resident | None = None) -> None:
        store: Store | None = None
        head: ChannelRecord | None = None
        try:
            store = self._open_store()
            seen = self.head or self.record
            head = store.head(self._channel, since=seen.number if seen else 1)
            check_onward(self._channel, seen=seen, head=head, asked=asked)
            self.head = head
            if head is not None and head != self._newest:
                failed = self.failure if self.failure and self.failure.record == head else None
                if failed is not None and not asked and self._clock() < failed.retry_at:
                    return
                self._serve_before(head, store)
                resident = self._traced_load(head, store, in_memory=in_memory)
                at_once = self._loaded.served is None or self.fallback
                self.cutover.take_up(resident, head, at_once=at_once)
        except Exception as error:
            failure = self._remember(head, error)
            if store is not None and self._loaded.served is None:
                self._fall_back(store, failure)
            raise
        if self.failure is not None and self.record is not None:
            log.info("channel %s is followed again", self._told)
        self.failure, self.fallback = None, False
        self._followed, self._next_polls_left = store, NEXT_POLLS

    @property
    def _newest(self) -> ChannelRecord | None:
        """The newest record that was taken up: its version is served, or waits for its moment."""
        return self.cutover.newest or self.record

    def _serve_before(self, head: ChannelRecord, store: Store) -> None:
        """At the start, serve as other servers do until the head's moment comes. If that cannot be
        done, the head is served at once."""
        if self._loaded.served is not None or not self.cutover.wait_s(head):
            return
        try:
            past = earlier_records(store, self._channel, head)
            before = next((record for record in past if not self.cutover.wait_s(record)), None)
            if before is not None:
                self._serve(self._load(before, store), before)
        except Exception as error:
            log.warning("version %s does not wait for its moment: %s", head.target, error)

    def _traced_load(
        self, record: ChannelRecord, store: Store, *, in_memory: Resident | None
    ) -> Resident:
        began_ns = time.perf_counter_ns()
        try:
            resident = self._load(record, store, in_memory=in_memory)
        except Exception as error:
            if self._traces is not None:
                self._traces.not_loaded(record, _since(began_ns), public_message(error))
            raise
        if self._traces is not None:
            self._traces.loaded(record, _since(began_ns))
        return resident

    def _load(
        self, record: ChannelRecord, store: Store, *, in_memory: Resident | None = None
    ) -> Resident:
        if in_memory is not None and in_memory.manifest.digest == record.target_digest:
            return in_memory
        resident = self._loaded.find(record.target_digest)
        if resident is not None:
            return resident
        return self._loaded.load(store.resolve(record), shards=store, needed=True)

    def _serve(self, resident: Resident, record: ChannelRecord, *, fallback: bool = False) -> None:
        before, began_ns = self._loaded.served, time.perf_counter_ns()
        self._loaded.serve(resident)
        self.record, self.fallback = record, fallback
        if before is not resident:
            self._on_swap(resident.version)
            if self._traces is not None:
                self._traces.swapped(record, _since(began_ns))
            log.info(
                "serving version %s (%s, record %s)", resident.version, self._told, record.number
            )

    def _fall_back(self, store: Store, failure: _Failure) -> None:
        """Serve the newest version that the channel named before its head and that loads. If there
        is none, nothing changes, and the search is repeated with backoff."""
        if self._clock() < self._fall_back_at:
            return
        self._fall_back_at = failure.retry_at
        level = logging.WARNING if failure.times == 1 else logging.DEBUG
        try:
            for record in earlier_targets(store, self._channel, failure.record):
                if self._stop.is_set():
                    return
                try:
                    resident = self._load(record, store)
                except Exception as error:
                    log.log(level, "cannot load version %s either: %s", record.target, error)
                    continue
                self._serve(resident, record, fallback=True)
                log.warning("version %s is served until the head can be", record.target)
                return
        except Exception as error:  # the loop must not end, and what failed first is what counts
            log.log(level, "the past of channel %s cannot be read: %s", self._told, error)

    def _remember(self, head: ChannelRecord | None, error: Exception) -> _Failure:
        last = self.failure
        again = last is not None and last.record == head
        times = last.times + 1 if last and again else 1
        wait_s = min(_MAX_BACKOFF_S, self._poll_s * 2 ** min(times, 16))
        failure = _Failure(record=head, error=error, times=times, retry_at=self._clock() + wait_s)
        self.failure = failure
        if head is not None:
            self._on_failed_load()
        if not last or not again or str(last.error) != str(error):
            _say(self._told, head, error)
        return failure


def _since(began_ns: int) -> Times:
    return Times(began_ns=began_ns, ended_ns=time.perf_counter_ns())


def _say(channel: str, head: ChannelRecord | None, error: Exception) -> None:
    """Log one line, with a stack trace only for an unforeseen error."""
    unforeseen = None if isinstance(error, DneError | OSError) else error
    if isinstance(error, StoreNotFound):
        log.info("waiting for the store: %s", error)
    elif head is None:
        log.warning("cannot read channel %s: %s", channel, error, exc_info=unforeseen)
    else:
        log.error(
            "cannot load version %s (%s): %s", head.target, channel, error, exc_info=unforeseen
        )


def step_back() -> None:
    """Let the loading thread give way to those that answer. On Linux each thread has a priority."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)
    except OSError as error:  # a sandbox may forbid it, and versions are served all the same
        log.warning("the thread that loads versions keeps its priority: %s", error)
