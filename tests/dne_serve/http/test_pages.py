from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

import dne_serve
from dne_serve.http import pages
from tests.live_server import Live

PAGES = ("/", "/label", "/docs", "/versions/1/report")
FILES = sorted(f"/console/{path.name}" for path in pages.CONSOLE.iterdir())
ASSETS = re.compile(r'(?:src|href)="([^"]+)"')
PRELOADED = re.compile(r'<link rel="modulepreload" href="console/([^"]+)">')
IMPORTED = re.compile(r'^import (?:[^"]+ from )?"\./([^"]+)";$', re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_all_it_refers_to_come_from_this_server(steady: Live, page: str) -> None:
    answer = steady.http.get(page)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    for asset in ASSETS.findall(answer.text):
        assert "://" not in asset
        assert steady.http.get(urljoin(page, asset)).status_code == 200, asset


@pytest.mark.parametrize("page", PAGES)
def test_a_page_may_run_no_script_of_its_own_text(steady: Live, page: str) -> None:
    answer = steady.http.get(page)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|<style|javascript:", answer.text)


@pytest.mark.parametrize("path", [*PAGES, "/openapi.json", *FILES])
def test_everything_the_pages_are_made_of_is_under_the_same_policy(steady: Live, path: str) -> None:
    answer = steady.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == pages.POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in pages.POLICY


def test_the_scripts_write_text_only_and_ask_this_server_only() -> None:
    scripts = {path.name: path.read_text() for path in pages.CONSOLE.glob("*.js")}
    holes = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "://")
    found = [(name, hole) for name, text in scripts.items() for hole in holes if hole in text]
    assert found == []


def test_the_first_page_asks_for_all_its_scripts_at_once() -> None:
    first = "console.js"
    needed, waiting = set[str](), [first]
    while waiting:
        script = waiting.pop()
        found = {*IMPORTED.findall((pages.CONSOLE / script).read_text())} - needed
        needed |= found
        waiting += found
    preloaded = PRELOADED.findall((pages.CONSOLE / "index.html").read_text())
    assert preloaded == sorted(needed - {first})


@pytest.mark.parametrize(
    "path", ["/console/../app.py", "/console/%2e%2e/app.py", "/console/..%2fapp.py"]
)
def test_static_files_are_those_of_the_console_only(steady: Live, path: str) -> None:
    assert steady.http.get(path).status_code == 404


def test_the_pages_are_part_of_the_package() -> None:
    assert Path(dne_serve.__file__).parent == pages.CONSOLE.parent
    assert {path.name for path in pages.CONSOLE.iterdir()} == {
        "index.html", "style.css", "console.js", "ask.js", "elements.js", "moves.js", "predict.js",
        "versions.js", "live.js", "compare.js", "offline.js", "docs.html", "docs.css", "docs.js",
        "models.html", "models.css", "models.js", "schema.js", "try.js", "icon.svg",
        "label.html", "label.css", "label.js", "label_examples.js",
        "label_items.js", "label_names.js", "label_tiles.js",
        "learn.js", "report.html", "report.css", "report.js", "report_parts.js",
        "report_pictures.js", "plots.js", "version_facts.js", "versions_tree.js",
        "advice.js", "correct.js", "dropped.js", "tally.js", "teach.js", "why.js", "wrong.js",
        "zip.js",
    }  # fmt: skip
