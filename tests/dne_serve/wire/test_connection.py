"""Request lines, framing and trailers that no usual client sends, over the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dne_serve.wire.connection import Connection
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.dne_serve.wire.test_limits import assert_raw_problem, connect, rest
from tests.live_server import Live, live_server, png

MOST = 4096
HEALTH = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_HEALTH = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKED = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def wary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = Store.create(str(tmp_path_factory.mktemp("wary") / "models"))
    publish_letters(store)
    with live_server(
        Path(store.location),
        max_header_bytes=MOST,
        header_seconds=1,
        body_seconds=20,
        keep_alive_seconds=1,
    ) as live:
        live.wait_until_ready()
        yield live


def chunks(body: bytes, *, size: int, extension: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(one), extension, one) for one in pieces)


def test_trailers_are_let_pass_and_none_is_kept(wary: Live) -> None:
    trailers = b"Host: evil.example\r\nContent-Encoding: br\r\nX: 1\r\n\r\n"
    sent = CHUNKED + chunks(png(), size=50) + b"0\r\n" + trailers
    assert rest(connect(wary, sent)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "trailers",
    [b"X: 1\r\n" * 2000, b"X: " + b"x" * 3 * MOST, b"X" * 3 * MOST],
    ids=["many", "one that is long", "one that never ends"],
)
@pytest.mark.parametrize("body", [png(), bytes(200_000)], ids=["small", "large"])
def test_trailers_count_with_the_headers(wary: Live, trailers: bytes, body: bytes) -> None:
    sent = CHUNKED + chunks(body, size=20_000) + b"0\r\n" + trailers
    assert_raw_problem(rest(connect(wary, sent)), 431)


@pytest.mark.parametrize("extension", [b";" + b"x" * 300, b";x=" + b"y" * 3 * MOST])
def test_extensions_of_chunks_count_beyond_the_bytes_of_the_body(
    wary: Live, extension: bytes
) -> None:
    sent = CHUNKED + chunks(bytes(20_000), size=100, extension=extension) + b"0\r\n\r\n"
    assert_raw_problem(rest(connect(wary, sent)), 431)


def test_sizes_with_leading_zeros_count_too(wary: Live) -> None:
    sent = CHUNKED + b"".join(b"%0500x\r\nx\r\n" % 1 for _ in range(100))
    assert_raw_problem(rest(connect(wary, sent)), 431)


def test_a_body_in_chunks_of_a_byte_is_refused_and_one_in_small_chunks_is_not(wary: Live) -> None:
    last = b"0\r\n\r\n"
    assert_raw_problem(rest(connect(wary, CHUNKED + chunks(bytes(5000), size=1) + last)), 431)
    image = png() + bytes(100_000)  # what follows the end of a PNG is let pass
    answer = rest(connect(wary, CHUNKED + chunks(image, size=16) + last))
    assert answer.startswith(b"HTTP/1.1 200")


def test_headers_after_a_large_request_on_the_same_connection_are_not_taken_for_larger(
    wary: Live,
) -> None:
    """The end of the body and a part of the next request come at once."""
    body = bytes(60_000)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(wary, head.encode() + body + LAST_HEALTH[:20].encode()) as connection:
        assert connection.recv(12) == b"HTTP/1.1 422"
        connection.sendall(LAST_HEALTH[20:].encode())
        assert b"HTTP/1.1 200 OK" in rest(connection)


def test_requests_that_are_sent_ahead_wait_unparsed_and_are_all_answered(
    wary: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, waiting = Connection.on_headers_complete, [0]

    def watched(connection: Connection) -> None:
        plain(connection)
        waiting.append(len(connection.pipeline))

    monkeypatch.setattr(Connection, "on_headers_complete", watched)
    count = 1000
    answers = rest(connect(wary, HEALTH * count + LAST_HEALTH))
    assert answers.count(b"HTTP/1.1 200 OK") == count + 1
    assert max(waiting) < 250


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"\x00 no HTTP\r\n\r\n", b"400"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, b"431"),
    ],
)
def test_a_bad_request_behind_good_ones_is_refused_after_their_answers(
    wary: Live, bad: bytes, status: bytes
) -> None:
    answers = rest(connect(wary, HEALTH.encode() * 3 + bad))
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answers)
    assert statuses == [b"200", b"200", b"200", status]


def test_line_breaks_between_requests_do_not_keep_a_connection(wary: Live) -> None:
    connection = connect(wary, HEALTH)
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.sendall(b"\r\n")
    rest(connection)  # which fails when the server does not close


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("CONNECT evil.example:443 HTTP/1.1", 501),
        ("CONNECT / HTTP/1.1", 501),
        ("PRI * HTTP/2.0", 400),
        ("GET /healthz HTTP/2.0", 505),
        ("GET /healthz", 505),
        ("get /healthz HTTP/1.1", 400),
        ("G" * 3000 + " /healthz HTTP/1.1", 400),
        ("GET healthz HTTP/1.1", 400),
        ("GET http://evil.example/healthz HTTP/1.1", 400),
        ("GET http://user:word@localhost/healthz HTTP/1.1", 400),
        ("GET http://[::1/healthz HTTP/1.1", 400),
        ("GET http://localhost:80x/healthz HTTP/1.1", 400),
    ],
)
def test_an_odd_request_line_is_a_problem_and_leaves_no_traceback(
    wary: Live, line: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    answer = rest(connect(wary, f"{line}\r\nHost: localhost\r\n\r\n"))
    assert_raw_problem(answer, status)
    assert [record.levelname for record in caplog.records if record.levelno > 20] == []


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/healthz", 200),
        ("HTTP://LOCALHOST/healthz?x=1", 200),
        ("http://localhost", 200),
        ("http://localhost?x", 200),
    ],
)
def test_a_whole_address_in_the_request_line_is_its_path(
    wary: Live, target: str, status: int
) -> None:
    sent = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert rest(connect(wary, sent)).startswith(f"HTTP/1.1 {status}".encode())


def test_a_star_names_no_route(wary: Live) -> None:
    sent = "OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert_raw_problem(rest(connect(wary, sent)), 404)


@pytest.mark.parametrize("wish", ["websocket", "h2c"])
def test_a_wish_for_another_protocol_is_not_granted_and_the_request_is_answered(
    wary: Live, wish: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With its body, and nothing of that body is taken for a request."""
    image = png()
    head = (
        "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {wish}\r\n"
        f"Content-Length: {len(image)}\r\n\r\n"
    )
    answers = rest(connect(wary, head.encode() + image + LAST_HEALTH.encode()))
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b'"predictions"' in answers
    assert [record.levelname for record in caplog.records if record.levelno > 20] == []


@pytest.mark.parametrize(
    ("line", "status"),
    [("GET http://evil.example/ HTTP/1.1", 400), ("GET / HTTP/2.0", 505)],
)
def test_what_is_refused_is_refused_with_a_wish_for_another_protocol_too(
    wary: Live, line: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    wish = "Connection: Upgrade\r\nUpgrade: h2c\r\n"
    assert_raw_problem(rest(connect(wary, f"{line}\r\nHost: localhost\r\n{wish}\r\n")), status)
    assert [record.levelname for record in caplog.records if record.levelno > 20] == []


@pytest.mark.parametrize("wish", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_a_length_of_thousands_of_digits_is_400_and_no_fault_of_ours(
    steady: Live, wish: str, caplog: pytest.LogCaptureFixture
) -> None:
    length = f"Content-Length: {'0' * 5000}5\r\n"
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\n{wish}{length}\r\n"
    assert_raw_problem(rest(connect(steady, f"{head}12345")), 400)
    assert [record.levelname for record in caplog.records if record.levelno > 20] == []
