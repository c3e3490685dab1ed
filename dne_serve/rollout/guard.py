"""Watch a version after its promotion, and roll back when the version breaks a rule. Watch a
canary, raise its share while it breaks none, and promote it in the end.

Only faults of the engine count as errors of the version. Bad requests, full queues, images that
cannot be decoded and a store that cannot be read do not. The rollback is recorded and stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dne_serve.errors import ModelUnusable
from dne_serve.observe.events import Answered
from dne_serve.rollout.canary import CanaryAndShadow
from dne_serve.rollout.channel import ChannelMove, Mover
from dne_serve.rollout.cutover import age_s
from dne_serve.setting_values import GuardRule
from model_store.errors import ChannelMoved, DneError, KeyMissing, NothingToRollBack
from model_store.records.channel import ChannelRecord
from model_store.tables import percent

RETRY_S = 1.0
_MAX_RETRY_S = 60.0

log = logging.getLogger("dne_serve.guard")


@dataclass(slots=True)
class Counts:
    """Requests and images of one version, and the bad ones among them."""

    requests: int = 0
    errors: int = 0
    images: int = 0
    unknown: int = 0

    def add(self, event: Answered) -> None:
        """Count a request that the version has answered, or failed to answer."""
        if event.error is None:
            self.requests += 1
            self.images += event.images if event.is_traffic else 0
            self.unknown += event.unknown if event.is_traffic else 0
        elif event.decoding is not None and _is_fault_of_version(event.error):
            self.requests += 1
            self.errors += 1

    def broken(self, rules: Sequence[GuardRule], *, least: int) -> GuardRule | None:
        """Find a rule that the version breaks, by at least `least` requests or images."""
        for rule in rules:
            bad, of = self.seen(rule.what)
            if of >= least and bad > rule.share * of:
                return rule
        return None

    def seen(self, what: str) -> tuple[int, int]:
        """Return the number of bad requests or images, and of all of them."""
        if what == "errors":
            return self.errors, self.requests
        return self.unknown, self.images


@dataclass(slots=True)
class Watched:
    """The counts of one version since this server began to serve it."""

    record: ChannelRecord
    since: float
    until: float
    counts: Counts = field(default_factory=Counts)


class Guard:
    """A watch over the served version. The event loop and the reloader's thread report to it. A
    rollback runs on a thread of its own, because the store may be slow or away."""

    def __init__(
        self,
        mover: Mover,
        *,
        rules: Sequence[GuardRule],
        channel: str,
        actor: str,
        window_s: float,
        least: int,
        on_return: Callable[[ChannelRecord, str], None] = lambda record, rule: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Judge a share only if there are at least `least` requests or images. `on_return` gets
        the record of the rollback and the broken rule."""
        self._mover = mover
        self._rules = rules
        self._channel = channel
        self._actor = actor
        self._window_s = window_s
        self._least = least
        self._on_return = on_return
        self._clock = clock
        self._table = threading.Lock()
        self._watch: Watched | None = None
        self._is_first = True
        self._stopping = threading.Event()
        self._returning: threading.Thread | None = None

    def serving(self, record: ChannelRecord) -> None:
        """Begin to watch the version that `record` names, which this server has begun to serve."""
        # The first record may be old.
        old_s = max(0.0, age_s(record, now=time.time())) if self._is_first else 0.0
        self._is_first = False
        with self._table:
            self._watch = None
            if self._rules and record.mode == "follow" and old_s < self._window_s:
                now = self._clock()
                self._watch = Watched(record=record, since=now, until=now + self._window_s - old_s)

    def answered(self, event: Answered) -> None:
        """Count a request that the watched version has answered, or failed to answer."""
        version = event.version
        with self._table:
            watch = self._watch
            if watch is None or watch.record.target != version or self._clock() > watch.until:
                return
            watch.counts.add(event)
            broken = watch.counts.broken(self._rules, least=self._least)
            if broken is None:
                return
            self._watch = None  # one rollback is enough
            after_s = self._clock() - watch.since
            reason = _reason(watch.counts, broken, since=f"{after_s:.0f} s of version {version}")
        self._returning = threading.Thread(
            target=self._return, args=(watch.record, broken, reason), name="guard", daemon=True
        )
        self._returning.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._returning is not None:
            self._returning.join()

    def _return(self, record: ChannelRecord, rule: GuardRule, reason: str) -> None:
        log.warning("version %s breaks a rule: %s", record.target, reason)
        moved = _persistently(
            lambda: self._mover.rollback(
                to=None, actor=self._actor, reason=reason, after=record.number
            ),
            channel=self._channel,
            stopping=self._stopping,
        )
        if moved is not None:
            log.warning("the guard returned %s to version %s", self._channel, moved.target)
            self._on_return(moved, rule.text)


class CanaryWatch:
    """Doubles the share of a canary after each `step` requests that break no rule, and promotes it
    when it would answer all of them. A broken rule takes the canary's share away. Requests are
    noted on the event loop; a promotion runs on a thread of its own."""

    def __init__(
        self,
        mover: Mover,
        *,
        trial: CanaryAndShadow,
        served: Callable[[], ChannelRecord | None],
        rules: Sequence[GuardRule],
        channel: str,
        actor: str,
        least: int,
        on_promoted: Callable[[ChannelRecord, str], None] = lambda record, why: None,
    ) -> None:
        """`served` gives the record of the served version: only a channel that does not move during
        the trial, and is not pinned, is moved to the canary."""
        self._mover = mover
        self._trial = trial
        self._served = served
        self._rules = rules
        self._channel = channel
        self._actor = actor
        self._least = least
        self._on_promoted = on_promoted
        self._counts = Counts()
        self._since: ChannelRecord | None = None
        self._raise_at = self._step = trial.canary.step if trial.canary else 0
        self._is_over = self._step == 0
        self._stopping = threading.Event()
        self._promoting: threading.Thread | None = None

    def answered(self, event: Answered) -> None:
        """Count a request of the canary."""
        if self._is_over or event.by != "canary":
            return
        self._since = self._since or self._served()
        self._counts.add(event)
        broken = self._counts.broken(self._rules, least=self._least)
        if broken is not None:
            self._is_over = True
            self._trial.share = 0.0
            reason = _reason(self._counts, broken, since="its trial")
            log.warning("canary %s is taken back: %s", event.version, reason)
        elif self._counts.requests >= self._raise_at:
            self._raise_at += self._step
            self._raise(event.version)

    def stop(self) -> None:
        self._stopping.set()
        if self._promoting is not None:
            self._promoting.join()

    def _raise(self, version: int) -> None:
        share = 2 * self._trial.share
        if share < 1:
            self._trial.share = share
            log.info("canary %s answers %s of the requests now", version, percent(share))
            return
        self._is_over = True
        self._promoting = threading.Thread(
            target=self._promote, args=(version,), name="canary", daemon=True
        )
        self._promoting.start()

    def _promote(self, version: int) -> None:
        since, counts = self._since, self._counts
        if since is None or since.mode == "pin":
            log.warning("channel %s is pinned: canary %s is not promoted", self._channel, version)
            self._trial.share = 0.0
            return
        reason = f"canary: {counts.requests} requests, {counts.errors} failed, "
        reason += f"{counts.unknown} of {counts.images} images unknown"
        moved = _persistently(
            lambda: self._mover.promote(
                version, actor=self._actor, reason=reason, after=since.number
            ),
            channel=self._channel,
            stopping=self._stopping,
        )
        # After a rollback of the channel the canary must not answer again.
        self._trial.share = 0.0
        if moved is not None:
            log.info("canary %s is promoted in %s", version, self._channel)
            self._on_promoted(moved, reason)


def _persistently(
    move: Callable[[], ChannelMove], *, channel: str, stopping: threading.Event
) -> ChannelRecord | None:
    """Move a channel. Retry until it succeeds, or return None where it has moved otherwise."""
    wait_s = RETRY_S
    while not stopping.is_set():
        try:
            return move().record
        except (ChannelMoved, KeyMissing, NothingToRollBack) as error:
            log.warning("the guard leaves channel %s alone: %s", channel, error)
            return None
        except (DneError, OSError) as error:
            log.error("the guard cannot move %s: %s", channel, error)
            stopping.wait(wait_s)
            wait_s = min(_MAX_RETRY_S, 2 * wait_s)
    return None


def _is_fault_of_version(error: Exception) -> bool:
    """Return whether the engine failed on a version. The store, the decoder, a full queue and bad
    requests raise domain errors of their own, which do not count against the version."""
    return isinstance(error, ModelUnusable) or not isinstance(error, DneError)


def _reason(counts: Counts, rule: GuardRule, *, since: str) -> str:
    bad, of = counts.seen(rule.what)
    noun = "requests failed" if rule.what == "errors" else "images were unknown"
    return f"guard {rule.text}: {bad} of {of} {noun} ({percent(bad / of)}) within {since}"
