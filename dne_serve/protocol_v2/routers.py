"""Make the routers of the protocol, and refuse in the protocol's own form, `{"error": "…"}`."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.access.permission import Permission
from dne_serve.errors import NotOffered
from dne_serve.http.problems import MEDIA_TYPE
from dne_serve.http.scoped_route import Parts, needing
from dne_serve.protocol_v2.openapi import refusals
from model_store.records.fields import MAX_VERSION

PREFIX = "/v2"
TAG = "Open Inference Protocol"


def router(needed: Permission) -> APIRouter:
    """Make a router of the protocol whose routes all need this permission."""
    responses = {} if needed is Permission.OPEN else refusals(401, 403, 429)
    return APIRouter(prefix=PREFIX, tags=[TAG], route_class=needing(needed), responses=responses)


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def this_model(
    serving: Parts, model: Annotated[str, Path(description="The server's `--model-name`.")]
) -> None:
    if model != serving.settings.model_name:
        raise NotOffered(
            f"no model {model[:64]!r}: this server has {serving.settings.model_name!r}"
        )


ThisModel = Depends(this_model)
Version = Annotated[int, Path(ge=1, le=MAX_VERSION, description="A version in the store.")]


class ErrorForm:
    """Middleware that rewrites problem documents under `/v2`. Limits, tokens and unknown paths are
    refused before a route of the protocol is reached, and its clients read only `error`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_protocol(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """Sends one answer. A problem is held back until it is complete; all else passes through."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if Headers(raw=message["headers"]).get("content-type") == MEDIA_TYPE:
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)
            return
        await self._send(message)

    async def _finish(self, start: Message) -> None:
        problem = json.loads(self._body)
        body = json.dumps({"error": problem["detail"], "instance": problem["instance"]}).encode()
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def _is_protocol(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")
