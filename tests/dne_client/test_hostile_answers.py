"""A hostile server gets an error of the client's own, in bounded time and memory."""

from __future__ import annotations

import asyncio
import copy
import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dne_client import AsyncClient, Client, ClientError, NotUnderstood, Retries
from dne_client.__main__ import main
from tests.dne_client.fake_server import FakeServer, answer, client_of
from tests.hostile_server import answers, dumped, hostile, nasty_values, wait_until_quiet

ONCE = Retries(attempts=1)
PREDICTED = json.loads(answer("cat").content)
VERSIONS = {
    "served": 3, "channel": "production", "mode": "follow", "total": 1, "next_before": None,
    "versions": [
        {
            "version": 3, "parent": 2, "created": "now", "change": "learnt", "tasks": 1,
            "classes": 2, "new_classes": ["a"], "gate": "passed", "reasons": ["b"],
            "delta_bytes": 1, "total_bytes": 2, "error": None,
        }
    ],
}  # fmt: skip
PROBLEM = {"status": 422, "detail": "no image", "instance": "urn:1"}


def changed(whole: Any, value: object) -> Iterator[Any]:
    """Put the value in the place of each value in turn, at any depth; and leave out each key."""
    yield value
    places = whole.items() if isinstance(whole, dict) else enumerate(whole)
    for key, one in list(places):
        made = copy.copy(whole)
        del made[key]
        yield made
        for inner in changed(one, value) if isinstance(one, dict | list) else [value]:
            made = copy.copy(whole)
            made[key] = inner
            yield made


def raw(status: int, found: object, *, kind: str = "application/json") -> httpx.Response:
    return httpx.Response(status, content=dumped(found), headers={"content-type": kind})


@pytest.mark.parametrize("value", nasty_values(), ids=repr)
def test_every_field_of_an_answer_may_be_anything(
    value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is accepted can be printed in every form."""
    from dne_client.predicting import FORMATS, Printer, Told

    for found in changed(PREDICTED, value):
        client = client_of(lambda request, found=found: raw(200, found))  # type: ignore[misc]
        for outcome in client.predict_many([b"x"]):
            for form in FORMATS:
                told, out = Told(), io.StringIO()
                told.add(outcome)
                printer = Printer(form, out=out)
                printer.show(outcome)
                printer.close(told, seconds=1)
                out.getvalue().encode()
                assert "\x1b" not in out.getvalue()
    for found in changed(VERSIONS, value):
        try:
            listed = client_of(lambda request, found=found: raw(200, found)).versions()  # type: ignore[misc]
        except NotUnderstood:
            continue
        assert all(isinstance(one.version, int) for one in listed.versions)


@pytest.mark.parametrize("value", nasty_values(), ids=repr)
def test_every_field_of_a_problem_document_may_be_anything(value: object) -> None:
    for found in changed(PROBLEM, value):
        reply = raw(422, found, kind="application/problem+json")
        with pytest.raises(ClientError):
            FakeServer(reply).client().predict(b"x")


def test_no_prediction_for_an_image_is_an_error() -> None:
    for found in ({**PREDICTED, "predictions": []}, {**PREDICTED, "predictions": [1, 2]}):
        with pytest.raises(NotUnderstood):
            FakeServer(raw(200, found)).client().predict(b"x")


def ask(url: str, *, deadline_s: float) -> None:
    with Client(url, retries=ONCE, deadline_s=deadline_s) as client:
        client.versions()


def ask_async(url: str, *, deadline_s: float) -> None:
    async def run() -> None:
        async with AsyncClient(url, retries=ONCE, deadline_s=deadline_s) as client:
            await client.versions()

    asyncio.run(run())


@pytest.mark.parametrize("name", answers(1 << 10))
@pytest.mark.parametrize("asking", [ask, ask_async], ids=["sync", "async"])
def test_an_answer_without_end_ends_in_an_error_of_the_client(
    name: str, asking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dne_client.clients.MAX_ANSWER_BYTES", 1 << 20)
    pieces, wait_s = answers(4 << 20)[name]
    with hostile(pieces, wait_s=wait_s) as server:
        began = time.monotonic()
        with pytest.raises(ClientError) as found:
            asking(server.url, deadline_s=0.7)
        assert time.monotonic() - began < 20
        assert str(found.value)


@pytest.mark.parametrize("score", [-0.1, 1.1, 1e308, -1e308])
def test_a_score_that_is_no_probability_is_refused(score: float) -> None:
    with pytest.raises(NotUnderstood, match="score is not from 0 to 1"):
        FakeServer(answer("cat", score=score)).client().predict(b"x")


@pytest.mark.parametrize("url", ["http://a\u00e9..b", "http://a\n", "http://a:x", "http://"])
def test_an_address_that_cannot_be_asked_is_wrong_usage(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").write_bytes(b"x")
    assert main(["predict", "--url", url, str(tmp_path / "x.png")]) == 2
    assert "is not the address of a server" in capsys.readouterr().err


def test_one_layer_of_gzip_is_read() -> None:
    import gzip

    body = gzip.compress(json.dumps(VERSIONS).encode())
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    with hostile([head.encode(), body]) as server, Client(server.url) as client:
        assert client.versions().total == 1


def test_a_client_that_has_given_up_reads_no_more() -> None:
    pieces, _ = answers(1 << 10)["endless body"]
    with hostile(pieces) as server:
        with pytest.raises(ClientError):
            ask(server.url, deadline_s=0.3)
        wait_until_quiet(server)


@pytest.mark.parametrize(
    "label", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"]
)
def test_a_label_is_no_formula_in_csv_and_no_command_for_the_terminal(
    label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = answer(label, task="\x1b]0;owned\x07\u202e").content
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    (tmp_path / "a.png").write_bytes(b"x")
    with hostile([head, body]) as server:
        assert main(["predict", str(tmp_path), "--url", server.url, "--format", "csv"]) == 0
    out = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in out)
    (row,) = csv.DictReader(io.StringIO(out))
    assert row["label"].startswith("'")


def test_an_error_of_a_server_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    with hostile([b"HTTP/1.1 500 \x1b[2J\x1b]0;owned\x07\r\nContent-Length: 0\r\n\r\n"]) as server:
        assert main(["predict", str(tmp_path), "--url", server.url]) == 1
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
