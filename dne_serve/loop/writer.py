"""Define candidates for the inbox, and write them on a thread of its own off the request path.

The queue is bounded. A candidate is dropped and counted if the queue is full, or if a limit or the
store refuses it. The log says once that the store refuses candidates, and once that it takes them
again. The direction of an embedding is kept as one signed byte a channel, in base64: groups need
only directions, and the cosine of two embeddings changes by less than a hundredth.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import logging
import math
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dne_serve.engines.base import Floats, Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import NotKept, Refused, Stopped
from dne_serve.inference.answers import Listed, best_of
from dne_serve.inference.decode_worker import Reencoded
from dne_serve.loop.inbox_handle import InboxHandle, Retention
from dne_serve.setting_values import CollectLimits, CollectRule
from model_store.errors import (
    DneError,
    ImageRejected,
    ItemNotFound,
    LabelledOtherwise,
    LabelsFull,
    StoreError,
)
from model_store.loop.inbox import Judgement
from model_store.loop.index import ItemRow
from model_store.loop.item_names import picture_name, short_of, timestamp_of
from model_store.names import is_same
from model_store.records.inbox import ItemRecord, KeptPicture, TopClass

_Reason = Literal["queue", "hour", "total", "duplicate", "image", "store", "disk"]
KeepOutcome = Literal["kept", "known"] | _Reason
"""`known`: the item was in the inbox before."""
_KEPT_TOP = 5
MOST = 127
_MAX_CHANNELS = 4096
"""Only the first channels of a wider token are kept: the record of an item has a limit."""
KEEP, FEEDBACK, TAUGHT = "keep", "feedback", "taught"
"""The rules of pictures that a client asked to keep, sent feedback to, or sent with a label."""
KEEP_SHARE, RULES_SHARE = 0.5, 0.9
"""The share of the room for each kind. Half is reserved for rules and feedback, and a tenth for
feedback alone: every client that may predict can ask to keep pictures, or send pictures that the
rules choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """The answer to a picture, without a reference to the version, which may be unloaded."""

    version: int
    top: tuple[tuple[str, float], ...]
    margin: float
    is_unknown: bool
    unknown_score: float | None
    token: Floats | None = None
    """The token from the engine. Only the writer packs it, because few candidates are kept."""

    @classmethod
    def of(
        cls,
        resident: Resident,
        scored: Scored,
        *,
        listed: Sequence[Listed],
    ) -> GivenAnswer:
        """Note the likeliest classes. `listed` are the classes in the answer, which are usually
        enough."""
        if len(listed) >= min(_KEPT_TOP, len(resident.labels)):
            top = tuple((entry["label"], entry["score"]) for entry in listed[:_KEPT_TOP])
        else:
            scores = scored.probabilities
            order = best_of(scores, _KEPT_TOP)
            labels = [resident.labels[index] for index in order.tolist()]
            top = tuple(zip(labels, scores[order].tolist(), strict=True))
        return cls(
            version=resident.version,
            top=top,
            margin=top[0][1] - top[1][1] if len(top) > 1 else top[0][1],
            is_unknown=scored.is_unknown,
            unknown_score=scored.unknown_score,
            # A copy: a view would keep the tokens of its whole batch in memory.
            token=None if scored.token is None else scored.token.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How a candidate ended, and the item with its picture."""

    outcome: KeepOutcome
    item: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What somebody says of a picture that is sent to be learnt from."""

    judgement: Judgement
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepCandidate:
    """A picture as it was sent, with its answer and the rules that keep it. A picture that is
    taught has a label instead of an answer."""

    id: str
    data: bytes
    given: GivenAnswer | None
    rules: tuple[str, ...] = ()
    other: tuple[int, str] | None = None
    """Number and label of another version that disagrees."""
    taught: Taught | None = None
    kept: Future[Settled] | None = None
    """Set when the picture is kept, for a client that waits for it."""

    @property
    def nbytes(self) -> int:
        """The memory that the candidate takes, less a few hundred bytes."""
        token = self.given.token if self.given else None
        return len(self.data) + (0 if token is None else token.nbytes)

    @property
    def is_asked(self) -> bool:
        """Return whether a person waits, with feedback or a label. Such a picture skips the hourly
        cap and the check for near-duplicates."""
        return FEEDBACK in self.rules or self.taught is not None

    @property
    def share(self) -> float:
        """The share of queue and inbox that candidates of this kind may fill."""
        if FEEDBACK in self.rules:
            return 1.0
        return KEEP_SHARE if set(self.rules) == {KEEP} else RULES_SHARE

    def kept_by(self, rule: str, kept: Future[Settled]) -> KeepCandidate:
        return replace(self, rules=(*self.rules, rule), kept=kept)


def broken_rules(
    rules: tuple[CollectRule, ...], given: GivenAnswer, *, draw: float
) -> tuple[str, ...]:
    """List the rules that keep a picture. `draw` is a random number from 0 to 1."""
    broken = []
    for rule in rules:
        if (
            (rule.what == "unknown" and given.is_unknown)
            or (rule.what == "score" and given.top[0][1] < rule.bound)
            or (rule.what == "margin" and given.margin < rule.bound)
            or (rule.what == "sample" and draw < rule.bound)
        ):
            broken.append(rule.text)
    return tuple(broken)


def pack_direction(token: NDArray[np.floating]) -> str | None:
    """Encode the direction of a token; None if the token is zero or not finite."""
    kept = np.asarray(token[:_MAX_CHANNELS], dtype=np.float64)
    largest = float(np.abs(kept).max(initial=0.0))
    if not 0 < largest < np.inf:
        return None
    whole = np.rint(kept * (MOST / largest)).astype(np.int8)
    return base64.b64encode(whole.tobytes()).decode()


def unpack_direction(text: str) -> NDArray[np.float32]:
    """Decode a direction. Records are checked for base64 when they are read."""
    return np.frombuffer(base64.b64decode(text), dtype=np.int8).astype(np.float32)


NEAR_BITS = 6
"""Pictures whose hashes differ in at most this many of 64 bits are near-duplicates."""
MAX_WAITING = 64
MAX_WAITING_BYTES = 32 << 20
_HOUR_S = 3600.0
LOOK_S = 300.0
"""Time between two listings of the inbox, which other servers fill too."""
HOLD_OFF_S = 5.0
"""Time without writes after the store has refused one."""


log = logging.getLogger("dne_serve.loop")


class WaitingHashes:
    """The hashes of all pictures that wait for a label. Comparing with 100,000 takes 0.3 ms."""

    def __init__(self, hashes: Iterable[int] = ()) -> None:
        self._hashes: NDArray[np.uint64] = np.fromiter(hashes, dtype=np.uint64)
        self._count = len(self._hashes)

    def has_near(self, dhash: int) -> bool:
        differing = np.bitwise_count(self._hashes[: self._count] ^ np.uint64(dhash))
        return bool((differing <= NEAR_BITS).any())

    def add(self, dhash: int) -> None:
        if self._count == len(self._hashes):
            room = np.zeros(max(64, self._count // 4), dtype=np.uint64)
            self._hashes = np.concatenate((self._hashes, room))
        self._hashes[self._count] = dhash
        self._count += 1


class Reencodes(Protocol):
    """Decodes and encodes pictures, within limits."""

    def reencode(self, data: bytes) -> Reencoded: ...
    def stop(self) -> None: ...


class InboxWriter:
    """Keeps pictures on one thread. `offer` never waits, and is thread-safe."""

    def __init__(
        self,
        inbox_handle: InboxHandle,
        *,
        process: Reencodes,
        channel: str,
        limits: CollectLimits,
        sweeps: bool = True,
        on_outcome: Callable[[KeepOutcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `sweeps` the writer deletes overdue items too."""
        self._inbox_handle = inbox_handle
        self._process = process
        self._channel = channel
        self._limits = limits
        self._on_outcome = on_outcome
        self._clock = clock
        # What a person waits for goes first; then in the order of arrival.
        self._queue: queue.PriorityQueue[tuple[bool, int, KeepCandidate | None]]
        self._queue = queue.PriorityQueue()
        self._arrivals = itertools.count()
        self._lock = threading.Lock()
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="collect", daemon=True)
        self._last_hour: deque[float] = deque()
        self._waiting = WaitingHashes()
        self._look_at = 0.0
        self._retention = Retention(days=limits.days, clock=clock) if sweeps else None
        self._hold_off_until = 0.0
        self._refused = False
        self._stopping = False

    def start(self) -> None:
        """Start the thread, unless it was started before. Call this on one thread only."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current candidate, and drop the others."""
        self._stopping = True
        self._queue.put((False, -1, None))
        if self._thread.ident is not None:
            self._thread.join()
        self._process.stop()

    def offer(self, candidate: KeepCandidate) -> bool:
        """Queue a candidate. Return False, and count it, if there is no room."""
        with self._lock:
            fits = (
                self._waiting_count < _room(candidate, MAX_WAITING)
                and self._waiting_bytes + len(candidate.data) <= _room(candidate, MAX_WAITING_BYTES)
                and not self._stopping
            )
            if fits:
                self._waiting_count += 1
                self._waiting_bytes += len(candidate.data)
        if fits:
            self._queue.put((not candidate.is_asked, next(self._arrivals), candidate))
        else:
            self._on_outcome("queue")
        return fits

    def _run(self) -> None:
        self._tend()
        while True:
            try:
                *_, candidate = self._queue.get(timeout=LOOK_S)
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
        with suppress(queue.Empty):
            while True:
                self._refuse(self._queue.get_nowait()[-1])

    def _settle(self, candidate: KeepCandidate) -> None:
        """Keep a candidate or drop it, and resolve the future of a waiting client."""
        failure: DneError | None = None
        item = candidate.id
        try:
            outcome, item = self._keep(candidate)
        except (
            ItemNotFound,
            LabelledOtherwise,
            LabelsFull,
        ) as error:  # or the item was deleted, by this server or another one
            outcome, failure = "known", error
        except StoreError as error:
            outcome, failure = "store", error
            self._store_refused(error)
        except (ImageRejected, Refused) as error:
            outcome, failure = "image", error
        except Exception as error:  # one bad picture must not end the thread
            log.exception("a picture could not be kept")
            outcome, failure = "image", NotKept(f"the picture could not be kept ({error})")
        self._on_outcome(outcome)
        if candidate.kept is not None:
            if failure is None and outcome not in ("kept", "known"):
                failure = NotKept(f"the picture was not kept: {WHY[outcome]}")
            if failure is None:
                candidate.kept.set_result(Settled(outcome=outcome, item=item))
            else:
                candidate.kept.set_exception(failure)

    def _keep(self, candidate: KeepCandidate) -> tuple[KeepOutcome, str]:
        """Keep a candidate or drop it. Return the outcome, and the item with the picture."""
        now = self._clock()
        if now < self._hold_off_until and not candidate.is_asked:
            return "store", candidate.id
        index = self._inbox_handle.index
        if index.find(candidate.id) is not None:
            return "known", candidate.id
        if len(index) >= _room(candidate, self._limits.total):
            return "total", candidate.id
        if not candidate.is_asked and not self._has_allowance(candidate, now):
            return "hour", candidate.id
        if not self._has_free_disk():
            return "disk", candidate.id
        picture = self._process.reencode(candidate.data)
        if candidate.taught is not None:
            same = self._find_same(picture)
            if same is not None:
                self._learn_again(same, candidate.taught)
                return "known", same.id
        elif not candidate.is_asked and self._waiting.has_near(picture.dhash):
            return "duplicate", candidate.id
        record = _record(candidate, picture, channel=self._channel)
        self._inbox_handle.inbox.add(record, picture.data)
        short = short_of(picture_name(record))
        if short is not None:
            index.added(short)
        if candidate.taught is not None:
            self._label(record.id, candidate.taught)
        else:
            self._waiting.add(picture.dhash)
            self._last_hour.append(now)
        if self._refused:
            self._refused = False
            log.info("pictures are kept again")
        return "kept", record.id

    def _find_same(self, picture: Reencoded) -> ItemRow | None:
        """Find the item that has this very picture."""
        sha256 = hashlib.sha256(picture.data).hexdigest()
        for row in self._inbox_handle.index.with_hash(picture.dhash):
            with suppress(ItemNotFound):
                if self._inbox_handle.inbox.item(row.id).picture.sha256 == sha256:
                    return row
        return None

    def _learn_again(self, same: ItemRow, taught: Taught) -> None:
        """Label an item whose picture was sent again. Raise LabelledOtherwise if it has another
        label: a person has to choose."""
        head = self._inbox_handle.inbox.head(same.id)
        said = head.label if head is not None else None
        if said is None:
            self._label(same.id, taught)
        elif not is_same(said, taught.judgement.label or ""):
            raise LabelledOtherwise(
                f"the same picture is labelled {said!r} already (item {same.id}); give it one "
                "label on the page /label, or discard it"
            )

    def _label(self, item: str, taught: Taught) -> None:
        record = self._inbox_handle.inbox.judge(item, taught.judgement, actor=taught.actor)
        self._inbox_handle.index.judged(record)

    def _has_allowance(self, candidate: KeepCandidate, now: float) -> bool:
        while self._last_hour and now - self._last_hour[0] >= _HOUR_S:
            self._last_hour.popleft()
        return len(self._last_hour) < _room(candidate, self._limits.per_hour)

    def _has_free_disk(self) -> bool:
        free = self._inbox_handle.free_bytes
        if free is None or free >= self._limits.free_bytes:
            return True
        if not self._refused:
            self._refused = True
            log.error(
                "pictures are not kept while the disk of the store has less than "
                "the free-bytes of --collect: %s of %s are free",
                free,
                self._limits.free_bytes,
            )
        return False

    def _tend(self) -> None:
        """List the inbox from time to time, and delete overdue items."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            inbox, index = self._inbox_handle.inbox, self._inbox_handle.index
            index.refresh(whole=True)
            if self._retention is not None:
                self._retention.sweep(inbox, index)
            self._waiting = WaitingHashes(index.waiting_hashes())
        except StoreError as error:
            self._store_refused(error)
            self._look_at = now + HOLD_OFF_S

    def _store_refused(self, error: StoreError) -> None:
        self._hold_off_until = self._clock() + HOLD_OFF_S
        if not self._refused:
            self._refused = True
            log.error("pictures are not kept while the store refuses them: %s", error)

    def _refuse(self, candidate: KeepCandidate | None) -> None:
        if candidate is not None:
            self._on_outcome("queue")
            if candidate.kept is not None:
                candidate.kept.set_exception(Stopped("the server stops"))


WHY: dict[KeepOutcome, str] = {
    "total": "the inbox is full; label, discard or delete items, or raise total= of --collect",
    "hour": "too many were kept this hour",
    "duplicate": "a similar one waits already",
    "store": "the store cannot be written",
    "disk": "the disk of the store is nearly full; make room, or lower the free-bytes of --collect",
    "image": "it cannot be decoded",
    "queue": "too many wait to be written",
}


def _room(candidate: KeepCandidate, most: int) -> int:
    """Return the part of `most` that candidates of this kind may fill."""
    return math.ceil(candidate.share * most)


def _record(candidate: KeepCandidate, picture: Reencoded, *, channel: str) -> ItemRecord:
    given = candidate.given
    return ItemRecord(
        id=candidate.id,
        time=timestamp_of(candidate.id),
        picture=KeptPicture(
            sha256=hashlib.sha256(picture.data).hexdigest(),
            bytes=len(picture.data),
            type=picture.type,
            width=picture.width,
            height=picture.height,
            dhash=f"{picture.dhash:016x}",
        ),
        channel=channel,
        version=given.version if given else None,
        top=tuple(
            TopClass(label=label, score=_share(score))
            for label, score in (given.top if given else ())
        ),
        margin=_share(given.margin) if given else 0.0,
        unknown=given is not None and given.is_unknown,
        unknown_score=given.unknown_score if given else None,
        token=None if given is None or given.token is None else pack_direction(given.token),
        other_version=candidate.other[0] if candidate.other else None,
        other_label=candidate.other[1] if candidate.other else None,
        rules=tuple(dict.fromkeys(candidate.rules)),
        transaction=uuid.uuid4().hex,
    )


def _share(value: float) -> float:
    """Round a probability that lies outside 0…1 by the error of floating point."""
    return min(1.0, max(0.0, value))
