"""Choose the pictures to keep while requests are answered. Nothing here waits for anything."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dne_serve.collecting.candidate import FEEDBACK, KEEP, Candidate, Given, broken_rules
from dne_serve.collecting.recent import Recent
from dne_serve.collecting.writer import Writer
from dne_serve.engines.base import Resident
from dne_serve.errors import QueueFull
from dne_serve.inference.answers import Listed, Scored
from dne_serve.rules.collect import CollectRule
from model_store.inbox.naming import new_id


class Sent(Protocol):
    """A picture as a client has sent it."""

    @property
    def data(self) -> bytes: ...


class Collector:
    """The rules of a server and the writer that they feed."""

    def __init__(
        self,
        rules: tuple[CollectRule, ...],
        *,
        writer: Writer,
        recent: Recent | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._recent = recent or Recent()
        self._chance = chance or random.Random()
        self._disagrees = next((one.text for one in rules if one.what == "disagrees"), None)

    @property
    def wants_disagreement(self) -> bool:
        return self._disagrees is not None

    def watch(self, pictures: Sequence[Sent], *, keep: bool) -> Watch:
        """Begin to watch one request."""
        return Watch(collector=self, pictures=pictures, keep=keep)

    def judge(self, candidate: Candidate, *, keep: bool) -> Candidate:
        """Add the rules that a candidate is kept by, and hand it over if there are any."""
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

    def keep(self, item: str) -> Future[None] | None:
        """Have a picture kept that was answered a moment ago. Return None where it is not held any
        more: then it is in the inbox, or nowhere."""
        candidate = self._recent.get(item)
        if candidate is None:
            return None
        kept: Future[None] = Future()
        if not self._writer.offer(candidate.kept_by(FEEDBACK, kept)):
            raise QueueFull("too many pictures wait to be kept; try again soon")
        return kept

    def drop(self, item: str) -> None:
        """Forget a picture whose item is deleted."""
        self._recent.drop(item)


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """One request: its pictures are judged while its answer is written. The shadow may answer
    before that, or after it on another thread."""

    collector: Collector
    pictures: Sequence[Sent]
    keep: bool
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _others: Sequence[tuple[int, str] | None] | None = None
    _judged: dict[int, Candidate] = field(default_factory=dict)

    def answered(
        self,
        place: int,
        resident: Resident,
        scored: Scored,
        scores: NDArray[np.float64],
        listed: Sequence[Listed],
    ) -> str:
        """Judge the picture at a place of the request, and return its id."""
        given = Given.of(resident, scored, scores, listed=listed)
        with self._lock:
            candidate = Candidate(
                id=new_id(),
                data=self.pictures[place].data,
                given=given,
                other=None if self._others is None else self._others[place],
            )
            self._judged[place] = candidate = self.collector.judge(candidate, keep=self.keep)
        return candidate.id

    def compared(self, version: int, labels: Sequence[str | None]) -> None:
        """Note the labels of another version; None where it gives the same."""
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
