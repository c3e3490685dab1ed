"""Switch at an agreed moment: a version waits in memory until its channel record is old enough.

All servers of a channel read the same time in a record, so they switch together, although each of
them polls and loads when it can. A rollback does not wait: a bad version is left at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime

from dne_serve.engines.base import Resident
from dne_serve.rollout.loaded_versions import LoadedVersions
from model_store.records.channel import ChannelRecord

MAX_WAITING = 8
"""Versions that wait at a time. The oldest of more is passed over."""

log = logging.getLogger("dne_serve.reloader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A version in memory, and the moment of this machine's clock at which it is served."""

    record: ChannelRecord
    resident: Resident
    due: float
    over: Future[None] = field(default_factory=Future)
    """Done when the version is served, or a newer record has taken its place."""


class ScheduledCutover:
    """The versions that wait, and a thread that switches. The thread asks no store: a store that
    hangs does not delay the moment. At any time the newest record whose moment has come is served,
    on every server that has seen it."""

    def __init__(
        self,
        serve: Callable[[Resident, ChannelRecord], None],
        *,
        keeper: LoadedVersions,
        settle_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` is the clock that all machines share, in seconds since 1970."""
        self._serve = serve
        self._keeper = keeper
        self._settle_s = settle_s
        self._clock = clock
        self._wall = wall
        self._waiting: tuple[Waiting, ...] = ()
        self._turn = threading.Condition()
        self._over = False
        self._runs = False
        self._thread = threading.Thread(target=self._loop, name="settling", daemon=True)

    def start(self) -> None:
        """Switch from now on. The thread begins with the first version that waits."""
        self._runs = True

    def stop(self) -> None:
        with self._turn:
            self._over = True
            self._turn.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def newest(self) -> ChannelRecord | None:
        """The record of the version that is served last of those that wait."""
        waiting = self._waiting
        return waiting[-1].record if waiting else None

    def until_served(self, record: ChannelRecord) -> Future[None] | None:
        """Return the end of the record's waiting, or None if the record does not wait."""
        return next((waiting.over for waiting in self._waiting if waiting.record == record), None)

    def wait_s(self, record: ChannelRecord) -> float:
        """Compute the time until the record's moment: never more than the setting, so that a wrong
        clock delays a release and cannot stop it."""
        if record.mode == "pin":
            return 0.0
        return min(self._settle_s, max(0.0, self._settle_s - age_s(record, now=self._wall())))

    def take_up(self, resident: Resident, record: ChannelRecord, *, at_once: bool) -> None:
        """Serve the version of the newest record, now or when its moment comes."""
        with self._turn:
            wait_s = 0.0 if at_once else self.wait_s(record)
            if wait_s:
                waiting = Waiting(record=record, resident=resident, due=self._clock() + wait_s)
                earlier = (old for old in self._waiting if old.record.number < record.number)
                self._keep((*earlier, waiting)[-MAX_WAITING:])
                if self._runs and self._thread.ident is None:
                    self._thread.start()
                self._turn.notify_all()
                log.info("version %s waits %.2f s for its moment", resident.version, wait_s)
                return
            if not at_once:
                self._tell_if_late(record)
            try:
                self._serve(resident, record)
            finally:
                self._keep(())

    def switch(self) -> None:
        """Serve the newest version whose moment has come. Those before it are passed over."""
        with self._turn:
            now = self._clock()
            due = [waiting for waiting in self._waiting if waiting.due <= now]
            if not due:
                return
            try:
                self._serve(due[-1].resident, due[-1].record)
            finally:
                last = due[-1].record.number
                self._keep(tuple(later for later in self._waiting if later.record.number > last))

    def clear(self) -> None:
        """Cancel all waiting."""
        with self._turn:
            self._keep(())

    def _keep(self, stay: tuple[Waiting, ...]) -> None:
        gone = [waiting for waiting in self._waiting if waiting not in stay]
        self._waiting = stay
        self._keeper.hold(waiting.resident for waiting in stay)
        for waiting in gone:
            waiting.over.set_result(None)

    def _tell_if_late(self, record: ChannelRecord) -> None:
        late_s = age_s(record, now=self._wall()) - self._settle_s
        if self._settle_s and record.mode == "follow" and late_s > 0:
            log.warning(
                "version %s is ready %.1f s after its moment: other servers may serve it already; "
                "raise --settle-seconds, or compare the clocks",
                record.target,
                late_s,
            )

    def _loop(self) -> None:
        with self._turn:  # waiting lets go of it
            while not self._over:
                first = min((waiting.due for waiting in self._waiting), default=None)
                self._turn.wait(None if first is None else max(0.0, first - self._clock()))
                try:
                    self.switch()
                except Exception as error:  # a thread that ends would never switch again
                    log.error("a version could not be served at its moment", exc_info=error)


def age_s(record: ChannelRecord, *, now: float) -> float:
    """Compute the seconds since a record was written, by the writer's clock and ours. The age is
    negative if the two clocks differ by more than the age. A time that no calendar has is long ago:
    records come from a store, and stores are not trusted."""
    try:
        return now - datetime.fromisoformat(record.time).timestamp()
    except ValueError:
        return math.inf
