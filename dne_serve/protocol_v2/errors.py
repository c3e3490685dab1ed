"""Refusals in the protocol's own form, `{"error": "…"}`, wherever in the server they come from."""

from __future__ import annotations

import json

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.http.problems import MEDIA_TYPE

PREFIX = "/v2"


class ErrorForm:
    """Rewrites problem documents under `/v2`: limits, tokens and unknown paths are refused long
    before a route of the protocol is reached, and its clients read nothing but `error`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_protocol(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """One answer: a problem is held back until it is complete, anything else passes through."""

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
