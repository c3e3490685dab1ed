"""Commands and routes that the guides and README name exist: read from parsers and OpenAPI."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fastapi import FastAPI
from starlette.routing import Match

from dne_client.__main__ import completion_parser
from dne_client.demo import parser as demo_parser
from dne_client.predicting import models_parser
from dne_client.predicting import parser as predict_parser
from dne_serve.app import create_app
from dne_serve.cli import build_parser as serve_parser
from dne_serve.http.openapi import document
from dne_serve.settings import Settings
from model_store.cli.main import build_parser as store_parser
from tests.dne_serve.fake_engine import FakeEngine
from tests.docs.guide_blocks import GUIDES, Block, blocks_of, guide
from tests.docs.test_guides import STORIES, WITHOUT_PROGRAMS
from tests.packaging.project import ROOT
from trainer.cli import build_parser as train_parser

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "dne-train": train_parser,
    "dne-store": store_parser,
    "dne-serve": serve_parser,
    "dne train": train_parser,
    "dne store": store_parser,
    "dne serve": serve_parser,
    "dne predict": predict_parser,
    "dne models": models_parser,
    "dne demo": demo_parser,
    "dne completion": completion_parser,
}
NOT_EXECUTED = {
    "first-steps": ["it installs from a package index; `make test SUITE=wheel` installs the wheel"],
    "production": [
        "it needs a certificate and an address that others reach",
        "it needs docker",
    ],
}
"""All blocks of the guides that no test executes, and why."""
URL = re.compile(r"http://127\.0\.0\.1:8000(/[^\s\"'`)>?#]*)")
INLINE = re.compile(r"`(dne(?:-train|-store|-serve)? [^`]+)`")


def refusal(words: list[str]) -> str | None:
    """Ask the real parser of a command; return what it says against the words."""
    command = words[:1] if words[0] != "dne" else words[:2]
    parser = PARSERS[" ".join(command)]()
    try:
        parser.parse_args(words[len(command) :])
    except SystemExit as ended:
        return f"{shlex.join(words)} ends with {ended.code}" if ended.code else None
    return None


def ours(blocks: list[Block]) -> list[list[str]]:
    """List the uses of our commands in blocks of shell."""
    lines = [line for block in blocks if block.language == "sh" for line in block.commands()]
    return [words for line in lines for words in line if words and words[0].startswith("dne")]


@pytest.mark.parametrize("name", GUIDES)
def test_every_command_of_a_guide_is_one_that_its_parser_takes(name: str) -> None:
    shown = ours(guide(GUIDES[name]))
    assert [said for words in shown if (said := refusal(words))] == []
    assert shown or name in WITHOUT_PROGRAMS


@pytest.mark.parametrize("name", GUIDES)
def test_every_command_in_the_text_of_a_guide_has_options_that_exist(name: str) -> None:
    """Inline commands stand for numbers and names with capitals, which any parser would refuse."""
    text = re.sub(r"^```.*?^```$", "", GUIDES[name].read_text(), flags=re.MULTILINE | re.DOTALL)
    for shown in INLINE.findall(text):
        words = [{"N": "3", "NAME": "cat"}.get(word, word) for word in shlex.split(shown)]
        if "…" not in words:
            assert options_of(words) <= known_options(words), shown


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def known_options(words: list[str]) -> set[str]:
    """Walk the parsers of a command down to the one that takes the options."""
    command = words[:1] if words[0] != "dne" else words[:2]
    parser, rest = PARSERS[" ".join(command)](), words[len(command) :]
    while below := [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]:
        assert rest, f"{shlex.join(words)} names no command"
        parser, rest = below[0].choices[rest[0]], rest[1:]
    return set(parser._option_string_actions)


def test_a_wrong_command_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "```sh\ndne-store roll-back --to 1\ndne-serve --prot 1 | cat\ndne-store list\n```\n"
    said = [refusal(words) for words in ours(blocks_of(text))]
    assert [one is None for one in said] == [False, False, True]
    capsys.readouterr()


def is_page(app: FastAPI, path: str) -> bool:
    """Return whether a route is there that the OpenAPI document leaves out, as it is for people."""
    asked = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    return any(route.matches(asked)[0] is Match.FULL for route in app.routes)


def test_every_route_that_the_guides_name_exists(tmp_path: Path) -> None:
    app = create_app(Settings(store=str(tmp_path)), engine=FakeEngine())
    known = [re.sub(r"\{\w+\}", "[^/]+", path) for path in document(app)["paths"]]
    texts = [path.read_text() for path in (*GUIDES.values(), ROOT / "README.md")]
    # Below the name of a model stand the routes of a model.
    shown = {re.sub(r"^/models/\w+/", "/", path) for text in texts for path in URL.findall(text)}
    routes = {one for one in shown if any(re.fullmatch(path, one) for path in known)}
    assert [one for one in sorted(shown - routes) if not is_page(app, one)] == []
    assert {"/predict", "/versions", "/rollback"} <= routes
    assert not is_page(app, "/versions/2/repotr")


def test_only_these_blocks_are_not_executed() -> None:
    found = {name: [b.reason for b in guide(path) if b.reason] for name, path in GUIDES.items()}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_EXECUTED


def test_every_guide_is_executed_and_stands_in_the_site() -> None:
    assert set(STORIES) | WITHOUT_PROGRAMS == set(GUIDES)
    assert all(not guide(GUIDES[name]) for name in WITHOUT_PROGRAMS)
    [guides] = [
        part["Guides"]
        for part in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
        if "Guides" in part
    ]
    listed = [Path(path).stem for entry in guides for path in entry.values()]
    assert sorted(listed) == sorted(GUIDES)


def test_notes_of_blocks_are_understood() -> None:
    text = "<!-- may end with 3 -->\n```sh\ndne-serve --port 1\n```\n\n```python\nprint(1)\n```\n"
    server, program = blocks_of(text)
    assert server.is_server
    assert server.endings == {0, 3}
    assert (program.language, program.endings, program.is_server) == ("python", {0}, False)
