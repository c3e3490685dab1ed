"""A Label Studio that is away, refuses, or is something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from model_store.errors import WrongUsage
from tests.trainer.loop.fake_label_studio import JWT, URL, FakeLabelStudio
from trainer.cli import main
from trainer.loop import label_studio_client as client
from trainer.loop.label_studio_client import Account, LabelStudioFailed

Fails = Callable[[httpx.Request], httpx.Response | None]


def raising(error: Exception) -> Fails:
    def fail(request: httpx.Request) -> None:
        raise error

    return fail


def test_a_server_that_is_away_is_tried_some_times_and_named(fake: FakeLabelStudio) -> None:
    fake.fails = raising(httpx.ConnectError("connection refused"))
    with fake.open() as server, pytest.raises(LabelStudioFailed, match=f"{URL} does not answer"):
        server.get("/api/projects/")
    assert len(fake.requests) == client.TRIES
    assert fake.waited == [0.5, 1.0, 2.0]


def test_a_server_that_is_busy_for_a_moment_is_asked_again(fake: FakeLabelStudio) -> None:
    replies = iter([httpx.Response(503), httpx.Response(502), None])
    fake.fails = lambda request: next(replies)
    with fake.open() as server:
        assert server.get("/api/projects/")["results"] == []


def test_an_import_that_may_have_arrived_is_not_sent_twice(fake: FakeLabelStudio) -> None:
    fake.fails = raising(httpx.ReadTimeout("no answer"))
    with fake.open() as server, pytest.raises(LabelStudioFailed):
        server.post("/api/projects/1/import", [])
    assert len(fake.requests) == 1


@pytest.mark.parametrize("token", ["wrong", "wrong.jwt.token"])
def test_a_wrong_token_is_told_so(fake: FakeLabelStudio, token: str) -> None:
    with fake.open(token) as server, pytest.raises(LabelStudioFailed, match="refuses the token"):
        server.get("/api/projects/")


def test_a_personal_token_buys_access_tokens_as_they_run_out(fake: FakeLabelStudio) -> None:
    with fake.open(JWT) as server:
        server.get("/api/projects/")
        fake.access = "access-2"
        server.get("/api/projects/")
    refreshed = [one for one in fake.requests if one.url.path == "/api/token/refresh/"]
    assert len(refreshed) == 2
    assert JWT not in "".join(one.headers.get("authorization", "") for one in fake.requests)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (httpx.Response(200, text="<html>"), "is it Label Studio"),
        (httpx.Response(302, headers={"location": "http://elsewhere/"}), "302"),
        (httpx.Response(400, json={"detail": "no\nsuch thing"}), r"\(no such thing\)"),
    ],
)
def test_another_answer_is_told(fake: FakeLabelStudio, reply: httpx.Response, says: str) -> None:
    fake.fails = lambda request: reply
    with fake.open() as server, pytest.raises(LabelStudioFailed, match=says):
        server.get("/api/projects/")
    assert len(fake.requests) == 1


def test_an_endless_answer_is_not_read_to_its_end(
    fake: FakeLabelStudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100)
    fake.fails = lambda request: httpx.Response(200, content=b"x" * 101)
    with fake.open() as server, pytest.raises(LabelStudioFailed, match="more than"):
        server.get("/api/projects/")


@pytest.mark.parametrize(
    ("url", "token", "says"),
    [
        ("ftp://label-studio", "t", "`url="),
        ("label-studio:8080", "t", "`url="),
        ("http://anna:secret@label-studio", "t", "`token` alone"),
        (URL, "two words", "not a token"),
        (URL, "brok\nen", "not a token"),
    ],
)
def test_a_wrong_address_or_token_is_wrong_usage(url: str, token: str, says: str) -> None:
    with pytest.raises(WrongUsage, match=says):
        Account(url=url, token=token)


@pytest.fixture
def command(
    fake: FakeLabelStudio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., int]:
    """`dne-train label-studio` on the fake."""
    transport, make = httpx.MockTransport(fake), httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **how: make(**{**how, "transport": transport}))

    def run(*arguments: str) -> int:
        return main(["label-studio", *arguments, "--store", str(tmp_path / "models"), "--url", URL])

    return run


@pytest.mark.usefixtures("store")
def test_push_and_pull_end_with_an_object_and_an_exit_code(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("push") == 2
    assert "DNE_LABEL_STUDIO_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("DNE_LABEL_STUDIO_TOKEN", "0123456789abcdef")
    assert command("pull") == 2
    assert "push" in capsys.readouterr().err
    assert command("push", "--json") == 0
    assert json.loads(capsys.readouterr().out)["created"] is True
    assert command("pull", "--json", "--project", "1") == 0
    assert json.loads(capsys.readouterr().out)["labelled"] == 0
    assert command("push") == 0
    assert f"{URL}/projects/1/data" in capsys.readouterr().out
    assert command("pull", "--token", "wrong") == 1
    assert "refuses the token" in capsys.readouterr().err
    assert command("push", "--project", "5") == 2
