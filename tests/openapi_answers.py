"""Judges an answer by the OpenAPI document that the server itself gives out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema_rs

JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    path: str
    method: str
    says: Mapping[str, Any]

    def parameters(self, where: str) -> list[str]:
        """The names of those that stand in the path or in the query."""
        found: list[dict[str, str]] = self.says.get("parameters", [])
        return [one["name"] for one in found if one["in"] == where]

    def needs(self, name: str) -> bool:
        """Whether the query must have this parameter."""
        found: list[dict[str, Any]] = self.says.get("parameters", [])
        return any(one["name"] == name and one.get("required") for one in found)


class Document:
    """The operations of a server, and what it promises to answer."""

    def __init__(self, http: httpx.Client) -> None:
        self._says: dict[str, Any] = http.get("/openapi.json").raise_for_status().json()
        self._components = as_json_schema(self._says["components"])

    def operations(self, method: str) -> Iterator[Operation]:
        for path, methods in self._says["paths"].items():
            if method in methods:
                yield Operation(path=path, method=method, says=methods[method])

    def operation(self, method: str, path: str) -> Operation:
        return Operation(path=path, method=method, says=self._says["paths"][path][method])

    def check(self, operation: Operation, answer: httpx.Response) -> None:
        """Fails where the status is not documented or the body is not what the schema says."""
        where = f"{operation.method} {answer.request.url}: {answer.status_code} {answer.text[:500]}"
        said = operation.says["responses"].get(str(answer.status_code))
        assert said is not None, where
        kind = answer.headers["content-type"].partition(";")[0]
        content = said.get("content", {})
        assert kind in content or not content, where
        schema = content.get(kind, {}).get("schema", {})
        if kind == JSON and schema:
            found = list(self._validator(schema).iter_errors(answer.json()))
            assert not found, f"{where}\n{found[0]}"

    def _validator(self, schema: Mapping[str, Any]) -> Any:
        whole = {**as_json_schema(schema), "components": self._components}
        return jsonschema_rs.Draft202012Validator(whole)


def as_json_schema(node: Any) -> Any:
    """The dialect of OpenAPI 3.0 says `nullable` and exclusive bounds in words of its own."""
    if isinstance(node, list):
        return [as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: as_json_schema(value) for key, value in node.items()}
    for bound in ("Minimum", "Maximum"):
        if made.get(f"exclusive{bound}") is True:
            made[f"exclusive{bound}"] = made.pop(bound.lower())
    if made.pop("nullable", None) is True:
        return {"anyOf": [made, {"type": "null"}]}
    return made
