"""Document requests that FastAPI does not read itself."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dne_serve.access.permission import Permission
from dne_serve.errors import NotOffered
from dne_serve.http.problems import MEDIA_TYPE
from dne_serve.http.scoped_route import Parts, needing
from dne_serve.inference.predictor import AT_LEAST_PARAMETER
from dne_serve.protocol_v2.schemas import (
    ErrorAnswer,
    IndexRequest,
    InferenceAnswer,
    InferenceRequest,
    LoadRequest,
)
from model_store.records.sealing import MAX_VERSION

BINARY = {"schema": {"type": "string", "format": "binary"}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the statuses of a route besides success."""
    return {
        status: {"description": HTTPStatus(status).phrase, "model": ErrorAnswer}
        for status in statuses
    }


def body_of(model: type[BaseModel], *, required: bool, binary: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": _whole(model.model_json_schema())}}
    if binary:
        content["application/octet-stream"] = BINARY
    return {"requestBody": {"required": required, "content": content}}


def _whole(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace every reference in a schema by its definition."""
    definitions = schema.pop("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        return _with_nulls({key: resolved(value) for key, value in node.items()})

    made: dict[str, Any] = resolved(schema)
    return made


def _with_nulls(node: dict[str, Any]) -> dict[str, Any]:
    """Allow null for every optional property, as `schemas.RequestPart` does."""
    for name, schema in node.get("properties", {}).items():
        if name not in node.get("required", ()):
            schema["nullable"] = True
    return node


INDEX_BODY = body_of(IndexRequest, required=False)
LOAD_BODY = body_of(LoadRequest, required=False)
INFER_BODY = {
    "parameters": [AT_LEAST_PARAMETER],
    **body_of(InferenceRequest, required=True, binary=True),
}
INFER_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs; binary when they were asked for so.",
        "model": InferenceAnswer,
        "content": {"application/octet-stream": BINARY},
    }
}


PREFIX = "/v2"
_TAG = "Open Inference Protocol"


def router(needed: Permission) -> APIRouter:
    """Make a router of the protocol whose routes all need this permission."""
    responses = {} if needed is Permission.OPEN else refusals(401, 403, 429)
    return APIRouter(prefix=PREFIX, tags=[_TAG], route_class=needing(needed), responses=responses)


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def _this_model(
    serving: Parts, model: Annotated[str, Path(description="The server's `--model-name`.")]
) -> None:
    if model != serving.settings.model_name:
        raise NotOffered(
            f"no model {model[:64]!r}: this server has {serving.settings.model_name!r}"
        )


ThisModel = Depends(_this_model)
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
            # If the request is unwanted, the connection ends some time after the problem.
            if len(self._body) == int(Headers(raw=self._start["headers"])["content-length"]):
                start, self._start = self._start, None
                await self._finish(start, more=message.get("more_body", False))
            return
        await self._send(message)

    async def _finish(self, start: Message, *, more: bool) -> None:
        problem = json.loads(self._body)
        body = json.dumps({"error": problem["detail"], "instance": problem["instance"]}).encode()
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _is_protocol(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")
