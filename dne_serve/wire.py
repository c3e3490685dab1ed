"""How the application meets the network: uvicorn, set up."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from dne_serve.settings import Settings


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=settings.grace_seconds,
    )
