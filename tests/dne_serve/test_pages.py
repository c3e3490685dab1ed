from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dne_serve import pages
from tests.live_server import Live

PAGES = ("/", "/docs")
ASSETS = re.compile(r'(?:src|href)="([^"]+)"')


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_all_it_refers_to_come_from_this_server(steady: Live, page: str) -> None:
    answer = steady.http.get(page)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    for asset in ASSETS.findall(answer.text):
        assert "://" not in asset
        assert steady.http.get(f"/{asset}").status_code == 200, asset


@pytest.mark.parametrize("page", PAGES)
def test_a_page_may_run_no_script_of_its_own_text(steady: Live, page: str) -> None:
    answer = steady.http.get(page)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|<style|javascript:", answer.text)


def test_the_console_writes_text_only() -> None:
    script = (pages.CONSOLE / "console.js").read_text()
    for hole in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert hole not in script


@pytest.mark.parametrize(
    "path", ["/console/../app.py", "/console/%2e%2e/app.py", "/console/..%2fapp.py"]
)
def test_static_files_are_those_of_the_console_only(steady: Live, path: str) -> None:
    assert steady.http.get(path).status_code == 404


def test_the_pages_are_part_of_the_package() -> None:
    assert Path(pages.__file__).parent in pages.CONSOLE.parents
    assert {path.name for path in pages.CONSOLE.iterdir()} == {
        "index.html",
        "style.css",
        "console.js",
        "docs.html",
        "docs.js",
        "icon.svg",
    }


def test_the_document_speaks_the_dialect_of_the_bundled_swagger_ui(steady: Live) -> None:
    document = steady.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.0")
    for node in nodes(document):
        assert not {"const", "prefixItems"} & node.keys()
        assert node.get("type") != "null"
        if "$ref" in node:
            name = node["$ref"].removeprefix("#/components/schemas/")
            assert name in document["components"]["schemas"]


def test_every_route_is_documented_with_its_problems(steady: Live) -> None:
    paths = steady.http.get("/openapi.json").json()["paths"]
    assert {path for path in paths if not path.startswith("/v2")} == {
        "/predict",
        "/versions",
        "/versions/{version}",
        "/classes",
        "/rollback",
        "/promote",
        "/resume",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    assert paths["/predict"]["post"]["responses"].keys() == {
        "200", "400", "401", "403", "404", "406", "408", "413", "415", "422", "429", "503",
    }  # fmt: skip
    for route in ("/rollback", "/promote", "/resume"):
        operation = paths[route]["post"]
        assert operation["security"]
        assert {"401", "403"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]


def test_every_route_of_the_protocol_is_documented_with_its_refusals(steady: Live) -> None:
    paths = steady.http.get("/openapi.json").json()["paths"]
    protocol = {path: operations for path, operations in paths.items() if path.startswith("/v2")}
    assert len(protocol) == 30
    infer = protocol["/v2/models/{model}/infer"]["post"]
    assert infer["requestBody"]["content"].keys() == {
        "application/json", "application/octet-stream",
    }  # fmt: skip
    assert infer["responses"].keys() == {"200", "400", "404", "413", "415", "422", "503"}
    refusal = {"$ref": "#/components/schemas/ErrorAnswer"}
    for path, operations in protocol.items():
        for operation in operations.values():
            assert operation["summary"]
            assert {one["name"] for one in operation.get("parameters", ())} == set(
                re.findall(r"{(\w+)}", path)
            )
            for status, response in operation["responses"].items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"] == refusal


def nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in nodes(item)]
    if isinstance(node, dict):
        return [node, *(found for item in node.values() for found in nodes(item))]
    return []
