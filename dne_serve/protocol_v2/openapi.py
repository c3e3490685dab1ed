"""What the OpenAPI document says of requests that are read by hand."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from dne_serve.protocol_v2.schemas import (
    ErrorAnswer,
    IndexRequest,
    InferenceAnswer,
    InferenceRequest,
    LoadRequest,
)

BINARY = {"schema": {"type": "string", "format": "binary"}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The statuses besides success that a route documents."""
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
    """With every definition in the place where it is referred to."""
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
    """What may be left out may also be null: `schemas.Asked` takes both for the same."""
    for name, schema in node.get("properties", {}).items():
        if name not in node.get("required", ()):
            schema["nullable"] = True
    return node


INDEX_BODY = body_of(IndexRequest, required=False)
LOAD_BODY = body_of(LoadRequest, required=False)
INFER_BODY = body_of(InferenceRequest, required=True, binary=True)
INFER_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs; binary when they were asked for so.",
        "model": InferenceAnswer,
        "content": {"application/octet-stream": BINARY},
    }
}
