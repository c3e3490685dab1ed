"""A Label Studio that is hostile gets one sentence, in bounded time and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from model_store.errors import DneError, WrongUsage
from model_store.store.store import Store
from tests.hostile_server import answers, dumped, hostile, nasty_values
from tests.trainer.loop.fake_label_studio import FakeLabelStudio
from trainer.cli import main
from trainer.loop import label_studio as pulling
from trainer.loop import label_studio_client as client
from trainer.loop.label_studio import ProjectChoice, pull, push
from trainer.loop.label_studio_client import Account, LabelStudio, LabelStudioFailed

TOKEN = "0123456789abcdef"
BY_TITLE = ProjectChoice(project=None, title="Photos")


@pytest.mark.parametrize("name", answers(1 << 10))
def test_an_answer_without_end_is_told_in_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(client, "MAX_MEMORY", 1 << 20)
    monkeypatch.setattr(client, "ANSWER_S", 0.7)
    monkeypatch.setattr(client, "TRIES", 2)
    pieces, wait_s = answers(4 << 20)[name]
    with hostile(pieces, wait_s=wait_s) as server:
        account, began = Account(url=server.url, token=TOKEN), time.monotonic()
        with LabelStudio(account) as studio, pytest.raises(LabelStudioFailed) as found:
            studio.get("/api/projects/")
        assert time.monotonic() - began < 20
        assert str(found.value).isprintable()


@pytest.mark.parametrize("tasks", [1, 2000], ids=["slow pages", "slow writes"])
def test_a_pull_whose_pages_never_end_stops_at_the_deadline(
    fake: FakeLabelStudio, store: Store, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """Each page is quick and the server says that there are millions of tasks."""
    pages = 0

    def page(request: httpx.Request) -> httpx.Response | None:
        nonlocal pages
        if request.url.path != "/api/tasks/":
            return None
        pages += 1
        time.sleep(0.02)
        return httpx.Response(200, json={"tasks": [{"id": 1}] * tasks, "total": 10**9})

    with fake.open() as server:
        push(server, BY_TITLE, store=store, channel="production", limit=5)
    if tasks > 1:  # a page holds more than there is time for
        monkeypatch.setattr(pulling, "item_of", lambda *given, **named: time.sleep(0.005))
    monkeypatch.setattr(client, "WHOLE_S", 0.5)
    fake.fails, began = page, time.monotonic()
    with (
        fake.open() as server,
        pytest.raises(LabelStudioFailed, match=r"more than 0\.5 s over all"),
    ):
        pull(server, BY_TITLE, store=store)
    assert time.monotonic() - began < 3
    assert pages > 1 or tasks > 1


def replacing(path: str, body: bytes) -> Callable[[httpx.Request], httpx.Response | None]:
    """Answer one path with these bytes, and all others as ever."""
    return lambda request: httpx.Response(200, content=body) if request.url.path == path else None


PLACES = {
    "/api/tasks/": lambda value: [
        value,
        {"tasks": value, "total": 1},
        {"tasks": [value], "total": 1},
        {"tasks": [], "total": value},
        {"tasks": [{"id": 1}], "total": value or 1},
        {"tasks": [{"id": value, "data": value, "annotations": value}], "total": 1},
    ],
    "/api/projects/1/": lambda value: [
        value,
        {"id": value},
        {"id": 1, "label_config": value, "title": value, "model_version": value},
    ],
    "/api/projects/": lambda value: [
        value,
        {"results": value},
        {"results": [value, {"title": value, "id": value}]},
    ],
}


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("doing", ["push", "pull"])
def test_every_part_of_an_answer_may_be_anything(
    fake: FakeLabelStudio, store: Store, path: str, doing: str
) -> None:
    def act(chosen: ProjectChoice) -> None:
        with fake.open() as server:
            if doing == "push":
                push(server, chosen, store=store, channel="production", limit=5)
            else:
                pull(server, chosen, store=store)

    with fake.open() as server:
        push(server, BY_TITLE, store=store, channel="production", limit=5)
    chosen = BY_TITLE if path == "/api/projects/" else ProjectChoice(project=1, title="Photos")
    for value in nasty_values():
        for found in PLACES[path](value):
            fake.fails = replacing(path, dumped(found))
            with contextlib.suppress(DneError):
                act(chosen)


@pytest.mark.parametrize("access", ["\u00e9", "\ud800", "a\r\nX: b", "\x00"], ids=repr)
def test_an_access_token_that_is_no_header_ends_in_a_sentence(access: str) -> None:
    body = dumped({"access": access})
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with hostile([head, body]) as server:
        account = Account(url=server.url, token="a.b.c")
        with (
            LabelStudio(account) as studio,
            pytest.raises(LabelStudioFailed, match="printable"),
        ):
            studio.get("/api/projects/")


@pytest.mark.parametrize("url", ["http://[", "http://a\u00e9..b", "http://a\n", "http://a:x"])
def test_an_address_that_cannot_be_asked_is_wrong_usage(url: str) -> None:
    with pytest.raises(WrongUsage, match="is not the address of a server"):
        Account(url=url, token=TOKEN)


def test_a_total_that_is_no_number_ends_in_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = dumped({"tasks": [{"id": 1}], "total": "abc", "id": 1, "label_config": "\x1b[2J"})
    head = f"HTTP/1.1 400 \x1b[2J\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    monkeypatch.setenv("DNE_LABEL_STUDIO_TOKEN", TOKEN)
    with hostile([head, body]) as server:
        options = ["--store", store.location, "--url", server.url, "--project", "1"]
        assert main(["label-studio", "pull", *options]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_sealed_names_reach_the_terminal_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the three commands print passes one place."""
    from model_store.cli.command import run

    def said() -> int:
        print("one\x1b[2J\u202e\r\ttwo\nthree")
        raise LabelStudioFailed("no \x1b]0;owned\x07\nsecond line")

    assert run(said) == 1
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert told.out.endswith("\nthree\n")
    assert told.err.endswith("\nsecond line\n")
