"""The OpenAPI document, as clients are generated from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dne_serve.http.problems import ANSWERS
from tests.live_server import Live
from tests.packaging.project import ROOT

METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def document(steady: Live) -> dict[str, Any]:
    made: dict[str, Any] = steady.http.get("/openapi.json").json()
    return made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        assert found.keys() <= METHODS
        for method, operation in found.items():
            yield method, path, operation


def test_schemas_have_names_and_titles_of_their_own(document: dict[str, Any]) -> None:
    """A generator makes a class of each title, and leaves the second one of a name out."""
    schemas = document["components"]["schemas"]
    assert [name for name in schemas if not re.fullmatch(r"[A-Z][A-Za-z]+", name)] == []
    assert {name: schema["title"] for name, schema in schemas.items()} == {
        name: name for name in schemas
    }


def test_operations_have_ids_of_their_own_that_stay(document: dict[str, Any]) -> None:
    ids = {(method, path): one["operationId"] for method, path, one in operations(document)}
    assert [one for one, count in Counter(ids.values()).items() if count > 1] == []
    for (method, path), found in ids.items():
        route = re.sub(r"\W", "_", path)
        assert found.endswith(f"{route}_{method}")
        assert found.removesuffix(f"{route}_{method}")


def test_no_property_has_an_empty_object_as_its_default(document: dict[str, Any]) -> None:
    """Generators refuse such a default, and leave out the whole operation with it."""
    found = [node for node in nodes(document) if node.get("default") == {}]
    assert found == []


def test_every_status_is_in_the_guide(document: dict[str, Any], steady: Live) -> None:
    guide = (ROOT / "docs/http.md").read_text().partition("## Errors")[2]
    rows = re.findall(r"^\| ([\d, ]+) \|", guide, re.MULTILINE)
    told = {int(status) for row in rows for status in row.split(",")}
    declared = {int(status) for _, _, one in operations(document) for status in one["responses"]}
    answered = {answer.status for answer in ANSWERS.values()} | {
        steady.http.patch("/predict").status_code
    }
    assert {status for status in declared | answered if status >= 400} - told == set()


def test_the_document_speaks_version_3_0(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.0")
    for node in nodes(document):
        assert not {"const", "prefixItems", "propertyNames"} & node.keys()
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(bound) in (None, True)
        assert node.get("type") != "null"
        if "$ref" in node:
            name = node["$ref"].removeprefix("#/components/schemas/")
            assert name in document["components"]["schemas"]


def test_every_route_is_documented_with_its_problems(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert {path for path in paths if not path.startswith("/v2")} == {
        "/predict",
        "/versions",
        "/versions/{version}",
        "/versions/{version}/report.json",
        "/versions/{version}/report/images/{image}",
        "/classes",
        "/classes/examples",
        "/corrections",
        "/embeddings",
        "/inbox/{item}/alike",
        "/versions/{version}/kept",
        "/rollback",
        "/promote",
        "/resume",
        "/inbox",
        "/inbox/groups",
        "/inbox/{item}",
        "/inbox/{item}/image",
        "/inbox/{item}/label",
        "/feedback",
        "/versions/{version}/advice",
        "/jobs",
        "/jobs/{job}",
        "/jobs/{job}/cancel",
        "/label-studio/health",
        "/label-studio/setup",
        "/label-studio/predict",
        "/label-studio/webhook",
        "/live",
        "/healthz",
        "/readyz",
        "/metrics",
        "/models",
    }
    assert paths["/predict"]["post"]["responses"].keys() == {
        "200", "400", "401", "403", "404", "406", "408", "413", "415", "422", "429", "503",
    }  # fmt: skip
    for route in ("/rollback", "/promote", "/resume"):
        operation = paths[route]["post"]
        assert operation["security"]
        assert {"401", "403"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]


def test_every_route_of_the_protocol_is_documented_with_its_refusals(
    document: dict[str, Any],
) -> None:
    paths = document["paths"]
    protocol = {path: operations for path, operations in paths.items() if path.startswith("/v2")}
    assert len(protocol) == 30
    infer = protocol["/v2/models/{model}/infer"]["post"]
    assert infer["requestBody"]["content"].keys() == {
        "application/json", "application/octet-stream",
    }  # fmt: skip
    refused = {"400", "401", "403", "404", "413", "415", "422", "429", "503"}
    assert infer["responses"].keys() == {"200"} | refused
    refusal = {"$ref": "#/components/schemas/ErrorAnswer"}
    for path, operations in protocol.items():
        for operation in operations.values():
            assert operation["summary"]
            headers = {"Dne-At-Least"} if path.endswith("/infer") else set()
            named = {one["name"] for one in operation.get("parameters", ())}
            assert named == headers | set(re.findall(r"{(\w+)}", path))
            for status, response in operation["responses"].items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"] == refusal


def nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in nodes(item)]
    if isinstance(node, dict):
        return [node, *(found for item in node.values() for found in nodes(item))]
    return []
