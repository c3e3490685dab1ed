"""Notice that many pictures wait in the inbox."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from dne_serve.webhooks.events import Event, filled
from model_store.inbox.index import Index
from model_store.inbox.naming import time_of

LOOK_S = 60.0
"""Time between two looks: each lists the inbox."""


class InboxNews:
    """Make an event when as many pictures wait as `bound` says. The next one can come after their
    number has been below half of that: each label at the bound would make one otherwise."""

    def __init__(
        self,
        open_index: Callable[[], Index],
        *,
        bound: int,
        announce: Callable[[Event], None],
        recent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_index = open_index
        self._bound = bound
        self._announce = announce
        self._recent = timedelta(seconds=recent_s)
        self._clock = clock
        self._look_at = 0.0
        self._is_told: bool | None = None
        """None before the first look, which tells only what has happened recently."""

    def look(self, *, store_id: str) -> None:
        """Tell if the number is reached, unless the last look was a moment ago."""
        if self._clock() < self._look_at:
            return
        index = self._open_index()
        index.refresh()
        self._look_at = self._clock() + LOOK_S
        reached_by = index.waiting(self._bound)
        if reached_by is None:
            half_waits = index.waiting(max(1, self._bound // 2)) is not None
            self._is_told = bool(self._is_told) and half_waits
            return
        is_news = datetime.now(UTC) - time_of(reached_by) < self._recent
        if self._is_told is False or (self._is_told is None and is_news):
            waiting = index.counts()["unlabelled"]
            self._announce(
                filled(reached_by, bound=self._bound, waiting=waiting, store_id=store_id)
            )
        self._is_told = True
