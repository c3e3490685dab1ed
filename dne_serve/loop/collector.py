"""Choose the pictures to keep while requests are answered, without waiting for anything."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from dne_serve.engines.base import Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import QueueFull
from dne_serve.inference.answers import Listed
from dne_serve.loop.writer import (
    FEEDBACK,
    KEEP,
    GivenAnswer,
    InboxWriter,
    KeepCandidate,
    Settled,
    broken_rules,
)
from dne_serve.setting_values import CollectRule
from model_store.loop.item_names import new_id

MAX_BYTES = 32 << 20
_MAX_COUNT = 4096
MAX_AGE_S = 3600.0
"""The mark of an item that another process deleted stays in the inbox for longer than this."""


class RecentCandidates:
    """Candidates by id. Drop the oldest when there are too many, too large or too old ones.
    Thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: OrderedDict[str, tuple[float, KeepCandidate]] = OrderedDict()
        self._clock = clock
        self._lock = threading.Lock()

    def put(self, candidate: KeepCandidate) -> None:
        """Hold a candidate, and replace an earlier one with the same id."""
        with self._lock:
            self._pop(candidate.id)
            self._bytes += candidate.nbytes
            self._held[candidate.id] = self._clock(), candidate
            while self._bytes > self._max_bytes or len(self._held) > _MAX_COUNT:
                self._pop(next(iter(self._held)))
            self._pop_old()

    def get(self, item: str) -> KeepCandidate | None:
        with self._lock:
            self._pop_old()
            held = self._held.get(item)
            return held[1] if held else None

    def drop(self, item: str) -> None:
        """Drop a candidate whose item was deleted."""
        with self._lock:
            self._pop(item)

    def _pop(self, item: str) -> None:
        gone = self._held.pop(item, None)
        self._bytes -= gone[1].nbytes if gone else 0

    def _pop_old(self) -> None:
        before = self._clock() - MAX_AGE_S
        while self._held and next(iter(self._held.values()))[0] < before:
            self._pop(next(iter(self._held)))

    def __len__(self) -> int:
        return len(self._held)


class SentPicture(Protocol):
    """A picture as a client sent it."""

    @property
    def data(self) -> bytes: ...


class Collector:
    """Applies the rules of a server, and hands pictures to the writer."""

    def __init__(
        self,
        rules: tuple[CollectRule, ...],
        *,
        writer: InboxWriter,
        chance: random.Random | None = None,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._recent = RecentCandidates()
        self._chance = chance or random.Random()
        self._disagrees = next((rule.text for rule in rules if rule.what == "disagrees"), None)

    @property
    def wants_disagreement(self) -> bool:
        return self._disagrees is not None

    def watch(self, pictures: Sequence[SentPicture], *, keep: bool) -> RequestWatch:
        """Begin to watch a request."""
        return RequestWatch(collector=self, pictures=pictures, keep=keep)

    def judge(self, candidate: KeepCandidate, *, keep: bool) -> KeepCandidate:
        """Add the rules that keep a candidate, and hand it to the writer if there are any."""
        assert candidate.given is not None, "what is taught has no answer, and goes to the writer"
        rules = broken_rules(self._rules, candidate.given, draw=self._chance.random())
        if candidate.other is not None and self._disagrees is not None:
            rules = (*rules, self._disagrees)
        if keep:
            rules = (*rules, KEEP)
        judged = replace(candidate, rules=rules) if rules else candidate
        self._recent.put(judged)
        if rules:
            self._writer.offer(judged)
        return judged

    def keep(self, item: str) -> Future[Settled] | None:
        """Keep a picture that was answered a moment ago. Return None if it is not held any more:
        then it is in the inbox, or lost."""
        candidate = self._recent.get(item)
        if candidate is None:
            return None
        kept: Future[Settled] = Future()
        if not self._writer.offer(candidate.kept_by(FEEDBACK, kept)):
            raise QueueFull("too many pictures wait to be kept; try again soon")
        return kept

    def drop(self, item: str) -> None:
        """Drop a picture whose item is deleted."""
        self._recent.drop(item)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestWatch:
    """Watches a request, and judges its pictures while its answer is written. The shadow may
    answer before that, or after it on another thread."""

    collector: Collector
    pictures: Sequence[SentPicture]
    keep: bool
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _others: Sequence[tuple[int, str] | None] | None = None
    _judged: dict[int, KeepCandidate] = field(default_factory=dict)

    def answered(
        self,
        place: int,
        resident: Resident,
        scored: Scored,
        listed: Sequence[Listed],
    ) -> str:
        """Judge the picture at a place of the request, and return its id."""
        given = GivenAnswer.of(resident, scored, listed=listed)
        with self._lock:
            candidate = KeepCandidate(
                id=new_id(),
                data=self.pictures[place].data,
                given=given,
                other=None if self._others is None else self._others[place],
            )
            self._judged[place] = candidate = self.collector.judge(candidate, keep=self.keep)
        return candidate.id

    def compared(self, version: int, labels: Sequence[str | None]) -> None:
        """Note the labels of another version; None where it agrees."""
        with self._lock:
            self._others = [label if label is None else (version, label) for label in labels]
            late = [
                (place, candidate)
                for place, candidate in self._judged.items()
                if candidate.other is None and not candidate.rules
            ]
        if not self.collector.wants_disagreement:
            return
        for place, candidate in late:
            if self._others[place] is not None:
                self.collector.judge(replace(candidate, other=self._others[place]), keep=False)
