"""Configure uvicorn, with limits on connections."""

from __future__ import annotations

import logging
import resource

import uvicorn
from fastapi import FastAPI

from dne_serve.settings import Settings
from dne_serve.wire.connection import Connection, ConnectionLimits

OTHER_FILES = 256  # that a server has open besides its connections

log = logging.getLogger("dne_serve.wire")


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    limits = ConnectionLimits(
        connections=settings.max_connections,
        header_bytes=settings.fixed.max_header_bytes,
        header_s=settings.fixed.header_seconds,
        body_s=settings.fixed.body_seconds,
        send_s=settings.fixed.send_seconds,
    )
    _allow_files(settings.max_connections + OTHER_FILES)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
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
        log.warning("only %s files may be open: fewer than --max-connections needs", reached)
