"""Document requests that FastAPI does not read itself."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from dne_serve.inference.at_least import AT_LEAST_PARAMETER
from dne_serve.protocol_v2.schemas import (
    ErrorAnswer,
    IndexRequest,
    InferenceAnswer,
    InferenceRequest,
    LoadRequest,
)

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
    """Allow null for every optional property, as `schemas.Asked` does."""
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
