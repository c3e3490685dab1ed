"""Limits on connections, headers, bodies and waiting, over the wire."""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from dne_serve.inference.store_threads import ARRIVED
from dne_serve.wire import connection
from dne_serve.wire import server as wire
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.live_server import Live, assert_problem, live_server, png, wait_for

HEAD = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
FEW = 8


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = Store.create(str(tmp_path_factory.mktemp("strict") / "models"))
    publish_letters(store)
    with live_server(
        Path(store.location),
        max_body_bytes=100_000,
        max_buffered_bytes=250_000,
        max_header_bytes=2048,
        header_seconds=0.6,
        body_seconds=0.6,
        send_seconds=0.6,
        keep_alive_seconds=1,
    ) as live:
        live.wait_until_ready()
        yield live


def connect(live: Live, sent: str | bytes = "") -> socket.socket:
    address = urlsplit(live.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    connection.sendall(sent.encode() if isinstance(sent, str) else sent)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with connection:
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def assert_raw_problem(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"application/problem+json" in head
    assert b"connection: close" in head.lower()
    assert json.loads(body)["status"] == status


def test_a_connection_that_says_nothing_is_closed(strict: Live) -> None:
    assert rest(connect(strict)) == b""


@pytest.mark.parametrize("sent", ["G", "GET / HTTP/1.1\r\nHost: local", HEAD])
def test_headers_that_take_too_long_are_408(strict: Live, sent: str) -> None:
    assert_raw_problem(rest(connect(strict, sent)), 408)


@pytest.mark.long
def test_headers_that_drip_are_408_all_the_same(strict: Live) -> None:
    began = time.monotonic()
    with connect(strict, "GET / HTTP/1.1\r\nHost: localhost\r\nX: ") as connection:
        for _ in range(100):
            try:
                connection.sendall(b"x")
                time.sleep(0.05)
            except OSError:
                break
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("how", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_takes_too_long_is_408(strict: Live, how: str) -> None:
    assert_raw_problem(rest(connect(strict, f"{HEAD}{how}\r\n\r\n1\r\nx\r\n")), 408)


@pytest.mark.long
def test_a_connection_between_requests_is_closed_after_a_while(strict: Live) -> None:
    began = time.monotonic()
    answer = rest(connect(strict, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert 0.5 < time.monotonic() - began < 5


@pytest.mark.long
def test_also_one_that_was_answered_before_it_had_sent_its_body(strict: Live) -> None:
    body = "x" * 50_000
    sent = HEAD.replace("image/png", "text/plain") + f"Content-Length: {len(body)}\r\n\r\n"
    connection = connect(strict, sent)
    time.sleep(0.2)
    connection.sendall(body.encode())
    assert rest(connection).startswith(b"HTTP/1.1 415")


@pytest.mark.parametrize(
    "headers",
    ["X: " + "x" * 4000, "\r\n".join(f"X-{i}: {i}" for i in range(1000)), "X: " + "x" * 300_000],
)
def test_headers_that_are_too_large_are_431(strict: Live, headers: str) -> None:
    request = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n"
    assert_raw_problem(rest(connect(strict, request)), 431)


def test_headers_that_never_end_are_431(strict: Live) -> None:
    assert_raw_problem(rest(connect(strict, "GET / HTTP/1.1\r\nX: " + "x" * 3000)), 431)


def test_a_long_address_is_431(strict: Live) -> None:
    request = f"GET /{'x' * 4000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert_raw_problem(rest(connect(strict, request)), 431)


def test_usual_headers_pass(strict: Live) -> None:
    headers = {f"X-{i}": "x" * 100 for i in range(10)}
    for _ in range(3):  # on one connection: each request has the whole allowance
        assert strict.http.get("/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize("sent", ["nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\x16\x03\x01"])
def test_what_is_not_http_is_a_problem_too(strict: Live, sent: str) -> None:
    assert_raw_problem(rest(connect(strict, sent)), 400)


@pytest.mark.parametrize("sized", [True, False])
def test_a_body_over_the_limit_is_413_and_the_connection_closes(strict: Live, sized: bool) -> None:
    much = b"x" * 2_000_000
    how = f"Content-Length: {len(much)}" if sized else "Transfer-Encoding: chunked"
    sent = much if sized else b"%x\r\n%s\r\n0\r\n\r\n" % (len(much), much)
    assert_raw_problem(rest(connect(strict, f"{HEAD}{how}\r\n\r\n".encode() + sent)), 413)


def test_a_client_that_waits_for_a_word_sends_no_body(strict: Live) -> None:
    sent = f"{HEAD}Content-Length: 2000000\r\nExpect: 100-continue\r\n\r\n"
    answer = rest(connect(strict, sent))
    assert b"100 Continue" not in answer
    assert_raw_problem(answer, 413)


def test_bodies_that_are_too_much_together_are_503_and_then_not(strict: Live) -> None:
    with ExitStack() as open_ones:
        for _ in range(2):
            sent = f"{HEAD}Content-Length: 99999\r\n\r\n{'x' * 99_000}"
            open_ones.enter_context(connect(strict, sent))
        wait_for(lambda: strict.metric("dne_requests_under_way") >= 3)  # and the one that asks
        time.sleep(0.1)
        answer = strict.http.post(
            "/predict", content=b"x" * 90_000, headers={"Content-Type": "image/png"}
        )
        assert_problem(answer, 503, says="together")
        assert "retry-after" in answer.headers
    for _ in range(10):  # each is let go of
        answer = strict.http.post(
            "/predict", content=b"x" * 90_000, headers={"Content-Type": "image/png"}
        )
        assert_problem(answer, 422)


@pytest.mark.long
def test_an_answer_that_is_not_read_does_not_keep_the_connection(strict: Live) -> None:
    """Many answers are asked for on one connection, and none is read."""
    address = urlsplit(strict.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((address.hostname, address.port))
    much = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
    with connection, pytest.raises(ConnectionError):
        connection.sendall(much)


@pytest.mark.long
def test_when_connections_run_out_the_slowest_makes_room(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_connections": FEW, "header_seconds": 60}
    with live_server(tmp_path / "absent", **settings) as live, ExitStack() as slow:
        for _ in range(FEW):
            slow.enter_context(connect(live, "GET / HT"))
        assert httpx.get(f"{live.url}/healthz", timeout=5).status_code == 503
        time.sleep(connection.YOUNG_S + 0.1)
        for _ in range(FEW):
            assert httpx.get(f"{live.url}/healthz", timeout=5).status_code == 200


def test_the_limit_on_files_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    wire._allow_files(1000)
    wire._allow_files(2000)
    wire._allow_files(9000)
    assert asked == [(2000, 4096), (4096, 4096)]


def test_a_request_that_waits_too_long_is_503_and_is_never_run(
    store: Store, letters: Manifest
) -> None:
    with live_server(Path(store.location), max_wait_seconds=0.3) as live:
        live.wait_until_ready()
        before = live.metric("dne_images_total")
        with live.engine_held(), ThreadPoolExecutor() as others:
            waiting = [others.submit(live.predict, png(), png()) for _ in range(3)]
            answers = [one.result() for one in waiting]
        for answer in answers:
            assert_problem(answer, 503, says="waited 0.3 s")
            assert int(answer.headers["retry-after"]) >= 1
        assert live.predict(png()).status_code == 200
        assert live.metric("dne_images_total") == before + 1


@pytest.mark.parametrize("path", ["/predict", "/v2/models/dne/infer"])
def test_what_a_request_has_waited_for_the_event_loop_counts(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    plain, late_s = connection.Connection.on_message_complete, 0.0

    def read_earlier(one: connection.Connection) -> None:
        plain(one)
        one.scope[ARRIVED] -= late_s  # type: ignore[literal-required]

    monkeypatch.setattr(connection.Connection, "on_message_complete", read_earlier)
    image = base64.b64encode(png()).decode()
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [image]}
    body = {"images": [image]} if path == "/predict" else {"inputs": [tensor]}
    with live_server(Path(store.location), max_wait_seconds=30) as live:
        live.wait_until_ready()
        assert live.http.post(path, json=body).status_code == 200
        late_s = 31
        answer = live.http.post(path, json=body)
        assert answer.status_code == 503
        assert "has waited 30 s" in answer.text


def test_slow_connections_do_not_hold_up_others(strict: Live) -> None:
    """The short form; `make test SUITE=abuse` has five hundred of them."""

    async def ask() -> list[float]:
        took = []
        async with httpx.AsyncClient(base_url=strict.url) as http:
            for seed in range(20):
                began = time.monotonic()
                answer = await http.post("/predict", files={"files": png(seed)})
                assert answer.status_code == 200
                took.append(time.monotonic() - began)
        return took

    with ExitStack() as slow:
        for _ in range(50):
            slow.enter_context(connect(strict, f"{HEAD}Content-Length: 1000\r\n\r\nx"))
        assert max(asyncio.run(ask())) < 2
