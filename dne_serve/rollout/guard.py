"""Watch a version after its promotion, and roll back when the version breaks a rule.

Only faults of the engine count as errors of the version. Bad requests, full queues, images that
cannot be decoded and a store that cannot be read do not. The rollback is recorded and stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dne_serve.errors import ModelUnusable
from dne_serve.observe.events import Answered
from dne_serve.rollout.channel import Mover
from dne_serve.rollout.cutover import age_s
from dne_serve.setting_values import GuardRule
from model_store.errors import ChannelMoved, DneError, KeyMissing, NothingToRollBack
from model_store.records.channel import ChannelRecord
from model_store.tables import percent

RETRY_S = 1.0
_MAX_RETRY_S = 60.0

log = logging.getLogger("dne_serve.guard")


@dataclass(slots=True)
class Watched:
    """Counts for one version since this server began to serve it."""

    record: ChannelRecord
    since: float
    until: float
    requests: int = 0
    errors: int = 0
    images: int = 0
    unknown: int = 0

    def seen(self, what: str) -> tuple[int, int]:
        """Return the number of bad requests or images, and of all of them."""
        if what == "errors":
            return self.errors, self.requests
        return self.unknown, self.images


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
        if event.error is None:
            images = event.images if event.is_traffic else 0
            self._note(event.version, requests=1, images=images, unknown=_unknown(event))
        elif event.decoding is not None and _is_fault_of_version(event.error):
            self._note(event.version, requests=1, errors=1)

    def stop(self) -> None:
        self._stopping.set()
        if self._returning is not None:
            self._returning.join()

    def _note(self, version: int, **counts: int) -> None:
        with self._table:
            watch = self._watch
            if watch is None or watch.record.target != version or self._clock() > watch.until:
                return
            for name, count in counts.items():
                setattr(watch, name, getattr(watch, name) + count)
            seen = ((rule, *watch.seen(rule.what)) for rule in self._rules)
            broken = next(
                (rule for rule, bad, of in seen if of >= self._least and bad > rule.share * of),
                None,
            )
            if broken is None:
                return
            self._watch = None  # one rollback is enough
            reason = _reason(watch, broken, now=self._clock())
        self._returning = threading.Thread(
            target=self._return, args=(watch.record, broken, reason), name="guard", daemon=True
        )
        self._returning.start()

    def _return(self, record: ChannelRecord, rule: GuardRule, reason: str) -> None:
        """Roll back. Retry until it succeeds or the channel has moved otherwise."""
        log.warning("version %s breaks a rule: %s", record.target, reason)
        wait_s = RETRY_S
        while not self._stopping.is_set():
            try:
                moved = self._mover.rollback(
                    to=None, actor=self._actor, reason=reason, after=record.number
                ).record
            except (ChannelMoved, KeyMissing, NothingToRollBack) as error:
                log.warning("the guard leaves channel %s alone: %s", self._channel, error)
                return
            except (DneError, OSError) as error:
                log.error("the guard cannot roll back %s: %s", self._channel, error)
                self._stopping.wait(wait_s)
                wait_s = min(_MAX_RETRY_S, 2 * wait_s)
            else:
                log.warning("the guard returned %s to version %s", self._channel, moved.target)
                self._on_return(moved, rule.text)
                return


def _unknown(event: Answered) -> int:
    return event.unknown if event.is_traffic else 0


def _is_fault_of_version(error: Exception) -> bool:
    """Return whether the engine failed on a version. The store, the decoder, a full queue and bad
    requests raise domain errors of their own, which do not count against the version."""
    return isinstance(error, ModelUnusable) or not isinstance(error, DneError)


def _reason(watch: Watched, rule: GuardRule, *, now: float) -> str:
    bad, of = watch.seen(rule.what)
    noun = "requests failed" if rule.what == "errors" else "images were unknown"
    return (
        f"guard {rule.text}: {bad} of {of} {noun} ({percent(bad / of)}) within "
        f"{now - watch.since:.0f} s of version {watch.record.target}"
    )
