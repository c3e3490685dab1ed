"""Configure uvicorn with limits on connections, and stop it in three steps.

The server leaves the load balancer, closes the port, and answers what has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from dne_serve.settings import Settings
from dne_serve.wire.connection import Connection

_OTHER_FILES = 256  # that a server has open besides its connections

log = logging.getLogger("dne_serve.wire")


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    _allow_files(settings.fixed.max_connections + _OTHER_FILES)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": settings.fixed}),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_keep_alive=settings.fixed.keep_alive_seconds,
        timeout_graceful_shutdown=settings.grace_seconds,
    )


def _allow_files(wanted: int) -> None:
    """Raise the limit on open files as far as allowed: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return
    reached = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < wanted:
        log.warning(
            "only %s files may be open: fewer than the limit on connections needs; raise ulimit -n",
            reached,
        )


LINGER_S = 0.25
"""The time for requests that are on their way on open connections when the port is closed."""
LOOK_S = 0.01


class DrainingServer(uvicorn.Server):
    """A server that goes on for `drain_s` after SIGTERM. A second signal ends it at once, and so
    does Ctrl-C: a person at a terminal has no balancer. `on_drain` makes every answer close its
    connection."""

    def __init__(
        self, config: uvicorn.Config, *, drain_s: float, on_drain: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._on_drain = on_drain
        self._leaves_at: float | None = None
        self._opening: list[asyncio.Task[object]] = []  # the event loop itself holds on to no task

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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, and answer requests on connections that clients have opened before. To
        close an idle connection at once would reset a request that is on its way."""
        self._on_drain()
        listeners = [listener.dup() for listener in sockets or []]
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await asyncio.sleep(0)  # the event loop lets go of the port, and our copy holds it
        for listener in listeners:
            self._take_last(listener)
        await self._linger()
        await super().shutdown(sockets)

    async def _linger(self) -> None:
        ends_at = time.monotonic() + LINGER_S
        while not self.force_exit and time.monotonic() < ends_at:
            await asyncio.sleep(LOOK_S)
            if not self.server_state.connections and all(task.done() for task in self._opening):
                return

    def _take_last(self, listener: socket.socket) -> None:
        """Take the connections that the kernel holds for us, and close the port: closing it alone
        would reset them."""
        loop = asyncio.get_running_loop()
        with listener:
            taken = list(_pending(listener))
        for client in taken:
            opening = loop.connect_accepted_socket(self._protocol, client, ssl=self.config.ssl)
            self._opening.append(loop.create_task(opening))

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _pending(listener: socket.socket) -> Iterator[socket.socket]:
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # no more of them
            return
        connection.setblocking(False)
        yield connection
