"""Keep traces that wait, and post them in groups on a thread of its own.

A collector that is away, slow or wrong costs traces, and never an answer.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dne_serve.rules.webhooks import WebhookUrl
from dne_serve.tracing.spans import Trace
from dne_serve.webhooks.post import NotPosted, Poster
from model_store import __version__

MOST_WAITING = 4096
"""Traces that wait; the oldest makes room for a new one. They take a few MB."""
GROUP = 512
"""Traces in a post at most; as many wake the thread."""
PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
TRY_S = 10.0
HEADERS = {"Content-Type": "application/x-protobuf", "User-Agent": f"dne-serve/{__version__}"}
TRY_AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which the protocol lets the same traces be sent again."""

log = logging.getLogger("dne_serve.tracing")

OnOutcome = Callable[[str, int], None]
"""Told `sent`, `failed` or `dropped`, and of how many traces."""


class TraceOutbox:
    """A bounded queue of traces, and the thread that posts them."""

    def __init__(
        self,
        url: WebhookUrl,
        *,
        encode: Callable[[Sequence[Trace]], bytes],
        on_outcome: OnOutcome,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._url = url
        self._poster = Poster(url)
        self._encode = encode
        self._on_outcome = on_outcome
        self._pause_s = pause_s
        self._waiting: deque[Trace] = deque()
        self._changed = threading.Condition()
        self._ends: float | None = None
        """When the last post has to be over; None until the server stops."""
        self._faults = 0
        self._thread = threading.Thread(target=self._loop, name="traces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, trace: Trace) -> None:
        """Add a trace. This waits for nothing, and mostly wakes nobody."""
        with self._changed:
            self._waiting.append(trace)
            is_over = len(self._waiting) > MOST_WAITING
            if is_over:
                self._waiting.popleft()
            if len(self._waiting) == GROUP and not self._faults:
                self._changed.notify()
        if is_over:
            self._on_outcome("dropped", 1)

    def stop(self, *, within_s: float) -> None:
        """Post what waits, once and in this time. A post under way is left alone after it."""
        with self._changed:
            self._ends = time.monotonic() + within_s
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _loop(self) -> None:
        while not self._is_stopping():
            self._send_all()
        self._send_all()
        self._drop()

    def _is_stopping(self) -> bool:
        """Pause until there is something to do, and tell whether the server stops."""
        with self._changed:
            self._changed.wait_for(self._is_due, timeout=self._next_pause_s())
            return self._ends is not None

    def _is_due(self) -> bool:
        return self._ends is not None or (len(self._waiting) >= GROUP and not self._faults)

    def _next_pause_s(self) -> float:
        """Wait longer after each fault. A fleet must not try in step."""
        if not self._faults:
            return self._pause_s
        longest = min(MOST_PAUSE_S, self._pause_s * 2.0 ** min(self._faults, 10))
        return longest * random.uniform(0.5, 1)

    def _send_all(self) -> None:
        while group := self._take():
            if not self._send(group):
                return

    def _take(self) -> list[Trace]:
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]

    def _put_back(self, group: Sequence[Trace]) -> None:
        """Let the group wait again, as far as there is room beside younger traces."""
        with self._changed:
            room = MOST_WAITING - len(self._waiting)
            self._waiting.extendleft(reversed(group[max(0, len(group) - room) :]))
        if len(group) > room:
            self._on_outcome("dropped", len(group) - room)

    def _send(self, group: Sequence[Trace]) -> bool:
        """Post one group. Return False where a next one would meet the same fault."""
        try:
            body = self._encode(group)
            status = self._poster.post(body, headers=HEADERS, within_s=self._left_s())
        except NotPosted as error:
            self._faulty(str(error))
            self._put_back(group)
            return False
        except Exception as error:  # the thread must not end: later traces need it
            log.error("traces could not be written", exc_info=error)
            self._on_outcome("failed", len(group))
            return True
        if 200 <= status < 300:
            self._well(len(group))
            return True
        self._faulty(f"the answer was {status}")
        if status in TRY_AGAIN:
            self._put_back(group)
        else:
            self._on_outcome("failed", len(group))
        return False

    def _left_s(self) -> float:
        if self._ends is None:
            return TRY_S
        return max(0.001, min(TRY_S, self._ends - time.monotonic()))

    def _well(self, traces: int) -> None:
        if self._faults:
            log.info("traces reach %s again", self._url)
        self._faults = 0
        self._on_outcome("sent", traces)

    def _faulty(self, reason: str) -> None:
        """Tell the first fault of a row; the others would say the same for hours."""
        if not self._faults:
            log.warning("traces do not reach %s: %s; it is tried again", self._url, reason)
        self._faults += 1

    def _drop(self) -> None:
        with self._changed:
            lost = len(self._waiting)
            self._waiting.clear()
        if lost:
            self._on_outcome("dropped", lost)
