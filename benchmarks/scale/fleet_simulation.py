"""Simulate replicas that follow one channel of a bucket, through a start, a release and a rollback.

The requests are those that the server's own code sends (`fleet_requests.py`), and so are the rules
for polls, for jitter and for trying again. The bucket's speed is an assumption.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.scale.fleet_events import Events, Link, Process, Resume, Slots, Wait
from benchmarks.scale.fleet_requests import Episodes, Request, Requests
from dne_serve.rollout.reloader import LEAST_WAIT, NEXT_POLLS
from model_store.backends.s3 import RETRY

Source = Literal["bucket", "cache", "neighbour"]
Moves = Sequence[tuple[float, Literal["release", "rollback"]]]
START = -1
"""The record of a replica that has served nothing yet."""
START_S = 1.0
"""Seconds within which all replicas start, where they start together."""
BURST_S = 1.0
"""Seconds of its rate that a bucket answers at once after it was idle."""
NEAR_S = 0.001
"""Latency of a cache or a neighbour."""
SEEDS = 8
"""Replicas that fetch from the bucket at a time where neighbours hand shards on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Everything that was not measured. A megabyte is a million bytes."""

    replicas: int = 1000
    poll_s: float = 0.25
    latency_ms: float = 30.0
    """Median time from a request to the first byte; log-normal with `latency_spread`."""
    latency_spread: float = 0.5
    requests_per_s: float = 5500.0
    """Requests a second that the bucket answers. More get 503 and are tried again."""
    bucket_mb_per_s: float = 1250.0
    replica_mb_per_s: float = 125.0
    source: Source = "bucket"
    replicas_a_cache: int = 50
    fetch_jitter_s: float = 0.0
    """Longest random wait before a replica fetches a delta."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What the bucket got, and seconds from each move's record until each replica had switched."""

    requests: Counter[tuple[int, str]] = field(default_factory=Counter)
    """By second and verb, with those that were refused."""
    refused: int = 0
    failed_polls: int = 0
    bytes: int = 0
    peak_mb_per_s: float = 0.0
    switched_s: dict[int, list[float]] = field(default_factory=dict)

    def rate(self, verb: str, *, begin_s: int, end_s: int) -> float:
        found = sum(self.requests[second, verb] for second in range(begin_s, end_s))
        return found / (end_s - begin_s)

    def peak(self, *, begin_s: int = 0) -> int:
        """The most requests of a second."""
        totals: Counter[int] = Counter()
        for (second, _), count in self.requests.items():
            totals[second] += count
        return max(count for second, count in totals.items() if second >= begin_s)


class Refused(Exception):
    """The bucket refused a request as often as the client tries."""


class Bucket:
    """Answers a limited number of requests a second, over a limited link."""

    def __init__(
        self, events: Events, assumed: Assumptions, *, outcome: Outcome, chance: random.Random
    ) -> None:
        self._events, self._assumed = events, assumed
        self._outcome, self._chance = outcome, chance
        self._room = BURST_S * assumed.requests_per_s
        self._room_at_s = 0.0
        self.link = Link(
            events,
            bytes_per_s=1e6 * assumed.bucket_mb_per_s,
            each_bytes_per_s=1e6 * assumed.replica_mb_per_s,
        )

    def ask(self, request: Request) -> Process:
        backoff = RETRY["backoff"]
        first_s, longest_s = (
            backoff[name].total_seconds() for name in ("init_backoff", "max_backoff")
        )
        pause_s = first_s
        until_s = self._events.now_s + RETRY["retry_timeout"].total_seconds()
        while self._events.now_s <= until_s:
            self._outcome.requests[int(self._events.now_s), request.verb] += 1
            admitted = self._admits()
            yield self._events.sleep(self._latency_s())
            if admitted:
                if request.bytes:
                    yield self.link.transfer(request.bytes)
                return
            self._outcome.refused += 1
            pause_s = min(longest_s, self._chance.uniform(first_s, backoff["base"] * pause_s))
            yield self._events.sleep(pause_s)
        raise Refused

    def _latency_s(self) -> float:
        median_s = self._assumed.latency_ms / 1000
        return self._chance.lognormvariate(math.log(median_s), self._assumed.latency_spread)

    def _admits(self) -> bool:
        now_s, rate = self._events.now_s, self._assumed.requests_per_s
        self._room = min(BURST_S * rate, self._room + (now_s - self._room_at_s) * rate)
        self._room_at_s = now_s
        if self._room < 1:
            return False
        self._room -= 1
        return True


class Shards:
    """The ways of a shard to a replica: from the bucket, through a cache, or from a neighbour."""

    def __init__(self, events: Events, assumed: Assumptions, *, bucket: Bucket) -> None:
        self._events, self._assumed, self._bucket = events, assumed, bucket
        self._caches: dict[int, Link] = {}
        self._fetching: dict[tuple[int, int, int], list[Resume] | None] = {}
        self._slots: dict[tuple[int, int], Slots] = {}

    def fetch(self, request: Request, *, replica: int, place: tuple[int, int]) -> Process:
        """`place`: the move that the shard belongs to, and its index among the requests."""
        if self._assumed.source == "cache":
            return self._through_cache(request, replica // self._assumed.replicas_a_cache, place)
        if self._assumed.source == "neighbour":
            return self._from_neighbour(request, place)
        return self._bucket.ask(request)

    def _through_cache(self, request: Request, cache: int, place: tuple[int, int]) -> Process:
        """The first replica of a cache makes it fetch, and the others wait for that."""
        key = (cache, *place)
        if key not in self._fetching:
            self._fetching[key] = []
            yield from self._bucket.ask(request)
            waiting, self._fetching[key] = self._fetching[key], None
            for resume in waiting or ():
                self._events.at(self._events.now_s, resume)
        elif (waiting := self._fetching[key]) is not None:
            yield waiting.append
        if cache not in self._caches:
            self._caches[cache] = self._new_link()
        yield self._events.sleep(NEAR_S)
        yield self._caches[cache].transfer(request.bytes)

    def _from_neighbour(self, request: Request, place: tuple[int, int]) -> Process:
        """Some fetch from the bucket. Whoever has the shard hands it on to one other at a time."""
        slots = self._slots.get(place)
        if slots is None:
            slots = self._slots[place] = Slots(self._events)
            for _ in range(SEEDS):
                slots.add("bucket")
        slot = None
        while slot is None:
            yield slots.wait
            slot = slots.take()
        if slot == "bucket":
            yield from self._bucket.ask(request)
        else:
            speed = 1e6 * self._assumed.replica_mb_per_s
            yield self._events.sleep(NEAR_S + request.bytes / speed)
        slots.add(slot)
        slots.add("neighbour")

    def _new_link(self) -> Link:
        return Link(
            self._events,
            bytes_per_s=1e6 * self._assumed.bucket_mb_per_s,
            each_bytes_per_s=1e6 * self._assumed.replica_mb_per_s,
        )


class Fleet:
    """Replicas that poll until `end_s`. With `starts`, all of them start within a second."""

    def __init__(
        self,
        episodes: Episodes,
        assumed: Assumptions,
        *,
        moves: Moves,
        end_s: float,
        starts: bool = False,
    ) -> None:
        self._episodes, self._assumed = episodes, assumed
        self._moves, self._end_s, self._starts = moves, end_s, starts
        self._chance = random.Random(assumed.seed)
        self._events = Events()
        self.outcome = Outcome()
        self._bucket = Bucket(self._events, assumed, outcome=self.outcome, chance=self._chance)
        self._shards = Shards(self._events, assumed, bucket=self._bucket)

    def run(self) -> Outcome:
        for replica in range(self._assumed.replicas):
            self._events.begin(self._live(replica))
        self._events.run()
        self.outcome.bytes = self._bucket.link.bytes
        self.outcome.peak_mb_per_s = self._bucket.link.peak_bytes_per_s / 1e6
        return self.outcome

    def _live(self, replica: int) -> Process:
        head = START if self._starts else 0
        glances = 0 if self._starts else self._chance.randint(0, NEXT_POLLS)
        poll_s = self._assumed.poll_s
        yield self._events.sleep(self._chance.uniform(0, START_S if self._starts else poll_s))
        while self._events.now_s < self._end_s:
            try:
                if glances:
                    glances -= 1
                    yield from self._play(self._episodes.glance, replica=replica)
                    is_quiet = self._head() == head
                else:
                    is_quiet = False
                if not is_quiet:
                    head = yield from self._look(replica, head)
                    glances = NEXT_POLLS
            except Refused:
                self.outcome.failed_polls += 1
                glances = 0
            yield self._events.sleep(poll_s * self._chance.uniform(LEAST_WAIT, 1))

    def _head(self) -> int:
        """Count the moves so far: the number of the newest record."""
        return sum(time_s <= self._events.now_s for time_s, _ in self._moves)

    def _look(self, replica: int, head: int) -> Generator[Wait, None, int]:
        """Look at the channel, and take up the version that it names."""
        found = self._head()
        requests, load_s = self._work(head, found)
        yield from self._play(requests, replica=replica, move=found)
        yield self._events.sleep(load_s)
        if found != head:
            since_s = self._moves[found - 1][0] if found else 0.0
            self.outcome.switched_s.setdefault(found, []).append(self._events.now_s - since_s)
        return found

    def _work(self, head: int, found: int) -> tuple[Requests, float]:
        """Return the requests of a look that finds a record, and the seconds to load."""
        known = self._episodes
        if found == head:
            return known.look, 0.0
        if head == START:
            return known.start, known.start_s
        if self._moves[found - 1][1] == "rollback":
            return known.rollback[len(known.glance) :], 0.0
        return known.release[len(known.glance) :], known.load_s

    def _play(self, requests: Requests, *, replica: int, move: int = 0) -> Process:
        waited = False
        for index, request in enumerate(requests):
            if not request.is_shard:
                yield from self._bucket.ask(request)
                continue
            if not waited:
                yield self._events.sleep(self._chance.uniform(0, self._assumed.fetch_jitter_s))
                waited = True
            yield from self._shards.fetch(request, replica=replica, place=(move, index))
