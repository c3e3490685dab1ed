"""Stop in two steps: leave the load balancer first, then stop to take requests."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

log = logging.getLogger("dne_serve.wire")


class DrainingServer(uvicorn.Server):
    """A server that goes on for `drain_s` after SIGTERM. A second signal ends it at once, and so
    does Ctrl-C: a person at a terminal has no balancer."""

    def __init__(
        self, config: uvicorn.Config, *, drain_s: float, on_drain: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._leaves_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and self._drain_s and self._leaves_at is None:
            self._leaves_at = time.monotonic() + self._drain_s
            self._on_drain()
            log.info("not ready any more; stopping in %g s", self._drain_s)
            return
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._leaves_at is not None and time.monotonic() >= self._leaves_at:
            self.should_exit = True
        return await super().on_tick(counter)
