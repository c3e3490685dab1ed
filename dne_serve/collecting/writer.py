"""Write candidates to the inbox, on one thread that no answer waits for.

The hand-over is bounded. A candidate that does not fit, or that a cap or the store refuses, is
dropped and counted. The log says once that the store refuses, and once that it takes them again.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Protocol

from dne_serve.collecting.desk import Desk
from dne_serve.collecting.duplicates import Waiting
from dne_serve.collecting.tokens import packed
from dne_serve.errors import NotKept, Refused, Stopped
from dne_serve.inference.reencoding import Reencoded
from model_store.errors import DneError, ImageRejected, StoreError
from model_store.inbox.naming import picture_name, short_of, timestamp_of
from model_store.inbox.removal import delete_leftovers, expire
from model_store.records.inbox import ItemRecord, Picture, TopClass

if TYPE_CHECKING:
    from dne_serve.collecting.candidate import Candidate

MAX_WAITING = 64
MAX_WAITING_BYTES = 32 << 20
HOUR_S = 3600.0
LOOK_S = 300.0
"""Time between two listings of the inbox, which other servers fill too."""
HOLD_OFF_S = 5.0
"""Time for which a store that has refused is not asked again."""

Reason = Literal["queue", "hour", "total", "duplicate", "image", "store"]
Outcome = Literal["kept", "known"] | Reason
"""`known`: it was in the inbox before."""

log = logging.getLogger("dne_serve.collecting")


class Reencodes(Protocol):
    """The part of a decoding process that the writer needs."""

    def reencode(self, data: bytes) -> Reencoded: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    per_hour: int
    total: int
    days: float


class Writer:
    """One thread that keeps pictures. `offer` may be called on any thread, and never waits."""

    def __init__(
        self,
        desk: Desk,
        *,
        process: Reencodes,
        channel: str,
        caps: Caps,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._process = process
        self._channel = channel
        self._caps = caps
        self._on_outcome = on_outcome
        self._clock = clock
        self._queue: queue.Queue[Candidate | None] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="collect", daemon=True)
        self._last_hour: deque[float] = deque()
        self._waiting = Waiting()
        self._look_at = 0.0
        self._expire_at = 0.0
        self._hold_off_until = 0.0
        self._refused = False
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the candidate under way. Others are dropped."""
        self._stopping = True
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._process.stop()

    def offer(self, candidate: Candidate) -> bool:
        """Hand a candidate over. Return False, and count it, where there is no room."""
        with self._lock:
            fits = (
                self._waiting_count < MAX_WAITING
                and self._waiting_bytes + len(candidate.data) <= MAX_WAITING_BYTES
                and not self._stopping
            )
            if fits:
                self._waiting_count += 1
                self._waiting_bytes += len(candidate.data)
        if fits:
            self._queue.put(candidate)
        else:
            self._on_outcome("queue")
        return fits

    def _run(self) -> None:
        self._tend()
        while True:
            try:
                candidate = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                self._tend()
                continue
            if self._stopping:
                self._refuse(candidate)
                break
            if candidate is None:
                continue
            with self._lock:
                self._waiting_count -= 1
                self._waiting_bytes -= len(candidate.data)
            self._tend()
            self._settle(candidate)
        self._refuse_rest()

    def _settle(self, candidate: Candidate) -> None:
        """Keep a candidate or drop it, and tell a client that waits."""
        failure: DneError | None = None
        try:
            outcome = self._keep(candidate)
        except StoreError as error:
            outcome, failure = "store", error
            self._store_refused(error)
        except (ImageRejected, Refused) as error:
            outcome, failure = "image", error
        except Exception as error:  # the thread lives on, whatever a picture does
            log.exception("a picture could not be kept")
            outcome, failure = "image", NotKept(f"the picture could not be kept ({error})")
        self._on_outcome(outcome)
        if candidate.kept is not None:
            if failure is None and outcome not in ("kept", "known"):
                failure = NotKept(f"the picture was not kept: {WHY[outcome]}")
            if failure is None:
                candidate.kept.set_result(None)
            else:
                candidate.kept.set_exception(failure)

    def _keep(self, candidate: Candidate) -> Outcome:
        now = self._clock()
        if now < self._hold_off_until and not candidate.is_asked_for:
            return "store"
        index = self._desk.index
        if index.find(candidate.id) is not None:
            return "known"
        if len(index) >= self._caps.total:
            return "total"
        if not candidate.is_asked_for and not self._has_allowance(now):
            return "hour"
        picture = self._process.reencode(candidate.data)
        if not candidate.is_asked_for and self._waiting.has_near(picture.dhash):
            return "duplicate"
        record = _record(candidate, picture, channel=self._channel)
        self._desk.inbox.add(record, picture.data)
        short = short_of(picture_name(record))
        if short is not None:
            index.added(short)
        self._waiting.add(picture.dhash)
        self._last_hour.append(now)
        self._store_took()
        return "kept"

    def _has_allowance(self, now: float) -> bool:
        while self._last_hour and now - self._last_hour[0] >= HOUR_S:
            self._last_hour.popleft()
        return len(self._last_hour) < self._caps.per_hour

    def _tend(self) -> None:
        """List the inbox from time to time, and delete items whose time is over."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            inbox, index = self._desk.inbox, self._desk.index
            index.refresh(whole=True)
            if now >= self._expire_at:
                self._expire_at = now + HOUR_S
                moment = datetime.now(UTC)
                gone = expire(inbox, index, days=self._caps.days, now=moment)
                delete_leftovers(inbox, index, days=self._caps.days, now=moment)
                if gone:
                    log.info("%s items of the inbox were deleted after their time", gone)
            self._waiting = Waiting(index.waiting_hashes())
        except StoreError as error:
            self._store_refused(error)
            self._look_at = now + HOLD_OFF_S

    def _store_refused(self, error: StoreError) -> None:
        self._hold_off_until = self._clock() + HOLD_OFF_S
        if not self._refused:
            self._refused = True
            log.error("pictures are not kept while the store refuses them: %s", error)

    def _store_took(self) -> None:
        if self._refused:
            self._refused = False
            log.info("pictures are kept again")

    def _refuse_rest(self) -> None:
        """Drop what is left at the end."""
        with suppress(queue.Empty):
            while True:
                self._refuse(self._queue.get_nowait())

    def _refuse(self, candidate: Candidate | None) -> None:
        if candidate is not None:
            self._on_outcome("queue")
            if candidate.kept is not None:
                candidate.kept.set_exception(Stopped("the server stops"))


WHY: dict[Outcome, str] = {
    "total": "the inbox is full; label, discard or delete items, or raise --collect-total",
    "hour": "too many were kept this hour",
    "duplicate": "one that looks the same waits already",
    "store": "the store cannot be written",
    "image": "it cannot be decoded",
    "queue": "too many wait to be written",
}


def _record(candidate: Candidate, picture: Reencoded, *, channel: str) -> ItemRecord:
    given = candidate.given
    return ItemRecord(
        id=candidate.id,
        time=timestamp_of(candidate.id),
        picture=Picture(
            sha256=hashlib.sha256(picture.data).hexdigest(),
            bytes=len(picture.data),
            type=picture.type,
            width=picture.width,
            height=picture.height,
            dhash=f"{picture.dhash:016x}",
        ),
        channel=channel,
        version=given.version,
        top=tuple(TopClass(label=label, score=_share(score)) for label, score in given.top),
        margin=_share(given.margin),
        unknown=given.is_unknown,
        unknown_score=given.unknown_score,
        token=None if given.token is None else packed(given.token),
        other_version=candidate.other[0] if candidate.other else None,
        other_label=candidate.other[1] if candidate.other else None,
        rules=tuple(dict.fromkeys(candidate.rules)),
        transaction=uuid.uuid4().hex,
    )


def _share(value: float) -> float:
    """Round a probability that lies outside 0…1 by the error of floating point."""
    return min(1.0, max(0.0, value))
