"""Make the OpenAPI document in version 3.0, which more client generators read than 3.1."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from dne_serve.http.problems import MEDIA_TYPE
from dne_serve.http.schemas import JsonImages, ProblemAnswer

_DIALECT = "3.0.3"
_SCHEMAS = "#/components/schemas/"
_PROBLEM_SCHEMA = {"$ref": f"{_SCHEMAS}{ProblemAnswer.__name__}"}
IMAGES_SCHEMA = {"$ref": f"{_SCHEMAS}{JsonImages.__name__}"}
BEARER = "bearer"
BASIC = "basic"


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the statuses of a route besides success."""
    content = {MEDIA_TYPE: {"schema": _PROBLEM_SCHEMA}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


def document(app: FastAPI) -> dict[str, Any]:
    """Make the document once for each application."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=app.version,
            openapi_version=_DIALECT,
            description=app.description,
            routes=app.routes,
        )
        _drop_validation_errors(made)
        made["components"]["securitySchemes"] = {
            name: {"type": "http", "scheme": name} for name in (BEARER, BASIC)
        }
        made["components"]["schemas"] |= _schemas()
        app.openapi_schema = _in_dialect(made)
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    """Make the schemas that no endpoint's signature mentions."""
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (ProblemAnswer, "serialization"),
        (JsonImages, "validation"),
    ]
    _, made = models_json_schema(kinds, ref_template=f"{_SCHEMAS}{{model}}")
    schemas: dict[str, Any] = made["$defs"]
    return schemas


def _drop_validation_errors(made: dict[str, Any]) -> None:
    """Remove the 422 that FastAPI documents: a malformed request is a 400 here."""
    for operations in made["paths"].values():
        for operation in operations.values():
            documented = operation["responses"].get("422", {})
            if "HTTPValidationError" in str(documented):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)


def _in_dialect(node: Any) -> Any:
    """Write `null` as a type, `const` and exclusive bounds as version 3.0 has them, and leave out
    `propertyNames`, which it does not have. Leave out defaults that are empty objects: generators
    refuse them, and the whole operation with them."""
    if isinstance(node, list):
        return [_in_dialect(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _in_dialect(value) for key, value in node.items()}
    if made.get("default") == {}:
        del made["default"]
    if "const" in made:
        made["enum"] = [made.pop("const")]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(made.get(exclusive), int | float):
            made[bound], made[exclusive] = made[exclusive], True
    if "prefixItems" in made:
        made["items"] = made.pop("prefixItems")[0]
    made.pop("propertyNames", None)
    return _nullable(made)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    choices = schema.get("anyOf")
    if not isinstance(choices, list) or {"type": "null"} not in choices:
        return schema
    rest = [choice for choice in choices if choice != {"type": "null"}]
    bare = {key: value for key, value in schema.items() if key != "anyOf"}
    only = {"allOf": rest} if len(rest) == 1 and "$ref" in rest[0] else None
    if only is None:
        only = rest[0] if len(rest) == 1 else {"anyOf": rest}
    return {**bare, **only, "nullable": True}
