"""Send what the server does now to a few listeners, as server-sent events.

One task sums up the server for all listeners, and only while there is one. A listener gets the
members that have changed since its last event. A slow listener misses events.

When all places are taken, the oldest listener without a token gives way to a new one, first at the
address that has the most places. A listener with a token gives way only to another token, and only
if its own token has at least two places more.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dne_serve.errors import TooManyListeners
from dne_serve.observe.answer_counts import OTHER, Recently
from dne_serve.observe.metrics import Agreement, ModelCounts

MOST_CLASSES = 8
_LONGEST_NAME = 60
"""Characters of a class name: a name may have 200, and an event should stay small."""
EVERY_S = 5.0
LOOK_S = 0.1
"""Time between two checks whether the server is about to stop: a stream must not delay the stop."""
MOST_LISTENERS = 16
SAME = b":\n\n"
"""A comment: nothing has changed, and the connection is alive."""

Facts = Mapping[str, Any]


class RecentClass(BaseModel):
    """Images that were answered with a class. A long name is cut."""

    label: str
    images: int


class RecentClasses(BaseModel):
    """The last answers of the served version, at most 2,000 images."""

    images: int
    unknown: int
    """Images that were like no class."""
    classes: list[RecentClass]
    """The most frequent classes, the most frequent first."""
    others: int
    """Images of all other classes."""
    drift_classes: float | None
    """Population stability index of the mix of classes against the held-out images."""
    drift_scores: float | None
    """The same of scores."""


class Swap(BaseModel):
    """The last change of the served version. The time is that of the server's clock."""

    version: int
    time: float
    count: int


class Beside(BaseModel):
    """A version beside the served one, and the number of images on which both have the same label.
    An image counts if both were asked."""

    version: int
    same: int
    other: int
    answered: int
    """Images that it answered; 0 for a shadow."""
    share: float
    """The share of the requests that it answers now; 0 for a shadow."""


class ActivityAnswer(BaseModel):
    """The state of the server now. Rates and times are those of predictions."""

    version: int | None
    channel: str
    requests_per_second: float
    p50_ms: float | None
    p99_ms: float | None
    failed: float | None
    """Share of the requests of the last minute that were answered with 5xx."""
    queue: int
    queue_limit: int
    answers: RecentClasses | None
    swap: Swap | None
    canary: Beside | None
    shadow: Beside | None


def snapshot(
    counts: ModelCounts,
    *,
    version: int | None,
    channel: str,
    queue: int,
    queue_limit: int,
    canary: int | None,
    shadow: int | None,
    canary_share: float,
) -> ActivityAnswer:
    """Sum up the server at this moment, from its metrics and from what no metric keeps."""
    recently = None if version is None else counts.answers.look(version)
    pace, last = counts.latencies.pace(), counts.last_swap
    return ActivityAnswer(
        version=version,
        channel=channel,
        requests_per_second=_rounded(pace.requests_per_second),
        p50_ms=None if pace.p50_ms is None else _rounded(pace.p50_ms),
        p99_ms=None if pace.p99_ms is None else _rounded(pace.p99_ms),
        failed=None if pace.failed is None else round(pace.failed, 4),
        queue=queue,
        queue_limit=queue_limit,
        answers=_classes(recently) if recently else None,
        swap=last and Swap(version=last.version, time=round(last.time, 1), count=last.count),
        canary=_beside(canary, counts.canary, share=canary_share),
        shadow=_beside(shadow, counts.shadow, share=0.0),
    )


def _rounded(value: float) -> float:
    """Keep three digits: more would only make events longer."""
    return float(f"{value:.3g}")


def _classes(recently: Recently) -> RecentClasses:
    named = [(name, n) for name, n in recently.classes if name != OTHER][:MOST_CLASSES]
    drift = recently.drift
    return RecentClasses(
        images=recently.images,
        unknown=recently.unknown,
        classes=[RecentClass(label=_short(name), images=count) for name, count in named],
        others=recently.images - sum(count for _, count in named),
        drift_classes=None if drift.classes is None else round(drift.classes, 2),
        drift_scores=None if drift.scores is None else round(drift.scores, 2),
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _beside(version: int | None, agreed: Agreement, *, share: float) -> Beside | None:
    if version is None:
        return None
    return Beside(
        version=version,
        same=agreed.same,
        other=agreed.other,
        answered=agreed.answered,
        share=round(share, 4),
    )


@dataclass(eq=False, slots=True, kw_only=True)
class Listener:
    client: str
    """The name of a token, or an address."""
    has_token: bool
    is_over: bool = False
    stream: Stream | None = None


class Stream:
    """The live view of one model, with places that all models of a server share. Used on the event
    loop only."""

    def __init__(
        self,
        sum_up: Callable[[], Facts],
        *,
        ends: Callable[[], bool],
        every_s: float = EVERY_S,
        most: int = MOST_LISTENERS,
        listeners: list[Listener] | None = None,
    ) -> None:
        """`listeners` are those of all models."""
        self._sum_up = sum_up
        self._ends = ends
        self._every_s = every_s
        self._most = most
        self._listeners: list[Listener] = [] if listeners is None else listeners
        self._next: asyncio.Future[Facts | None] | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def check_room(self, new: Listener) -> None:
        """Raise TooManyListeners if this listener cannot have a place."""
        self._to_remove_for(new)

    def _to_remove_for(self, new: Listener) -> Listener | None:
        """Find the listener that gives way: the oldest one of the client with the most places."""
        if len(self._listeners) < self._most:
            return None
        counts = Counter(listener.client for listener in self._listeners)
        anonymous = [listener for listener in self._listeners if not listener.has_token]
        oldest = max(anonymous or self._listeners, key=lambda listener: counts[listener.client])
        is_fair = new.has_token and counts[oldest.client] > counts[new.client] + 1
        if not anonymous and not is_fair:
            raise TooManyListeners(
                f"{self._most} live views with tokens are open, and there may be no more; close one"
            )
        return oldest

    def _join(self, new: Listener) -> None:
        oldest = self._to_remove_for(new)
        if oldest is not None:
            self._leave(oldest)
        new.stream = self
        self._listeners.append(new)

    def _leave(self, listener: Listener) -> None:
        listener.is_over = True
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def events(self, listener: Listener) -> AsyncIterator[bytes]:
        """Yield events, the first one whole, until the place goes to another listener or the server
        is about to stop."""
        try:
            self._join(listener)
        except TooManyListeners:
            return  # another client took the last place meanwhile
        try:
            if self._ticking is None or self._ticking.done():
                self._next = asyncio.get_running_loop().create_future()
                self._ticking = asyncio.create_task(self._tick())
            known: Facts = {}
            facts: Facts | None = self._sum_up()
            while facts is not None and not self._ends() and not listener.is_over:
                yield event(facts, known=known)
                known = facts
                assert self._next is not None  # while the task ticks
                facts = await asyncio.shield(self._next)  # others wait for it too
        finally:
            self._leave(listener)

    async def _tick(self) -> None:
        """Send the facts to all listeners, and None at the end. Each of them sees a failure."""
        while any(listener.stream is self for listener in self._listeners):
            for _ in range(max(round(self._every_s / LOOK_S), 1)):
                await asyncio.sleep(min(LOOK_S, self._every_s))
                if self._ends():
                    break
            current, self._next = self._next, asyncio.get_running_loop().create_future()
            assert current is not None  # made before this task
            try:
                current.set_result(None if self._ends() else self._sum_up())
            except Exception as error:
                current.set_exception(error)
                current.exception()  # asyncio warns of failures that were never read


def event(facts: Facts, *, known: Facts) -> bytes:
    """Write the members that differ from the known ones."""
    changed = {name: value for name, value in facts.items() if known.get(name, ...) != value}
    if not changed:
        return SAME
    text = json.dumps(changed, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
