from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.live_server import Live, assert_problem, live_server, png


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("named") / "absent"
    hosts, origins = "Models.example.org, *.shop.example", "https://app.example.org"
    with live_server(folder, allowed_hosts=f"{hosts},{origins}") as live:
        yield live


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.:8000",
        "cat.localhost:1",
        "127.0.0.1",
        "192.168.1.7:8000",
        "[::1]:8000",
        "[fe80::1]",
        socket.gethostname(),
        "models.example.org",
        "MODELS.example.org:443",
        "a.shop.example",
    ],
)
def test_names_and_addresses_of_this_server_are_answered(named: Live, host: str) -> None:
    assert named.http.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "models.example.org.evil.example",
        "xshop.example",
        "shop.example",
        "127.0.0.1.evil.example",
        "[evil.example]",
        "1.1",
        "[::1]evil.example",
        "[::1]:80evil.example",
        "[::1",
        "::1",
        "[fe80::1%25eth0]",
        "[fe80::1%eth0]",
        "[::1]:",
        "127.0.0.1:evil.example",
        "127.0.0.1:99999",
        "127.0.0.1:8000:8000",
        "127.0.0.1:-1",
        "127.0.0.1.",
        "localhost:",
        "localhost..",
        ".localhost",
        "user@localhost",
        "user:word@localhost:8000",
        "localhost@evil.example",
        "local%68ost",
        "localhost%2eevil.example",
        "localhost/evil.example",
        "localhost evil.example",
        "localhost,evil.example",
        "evil.example:80.localhost",
    ],
)
def test_a_name_that_was_pointed_here_is_421_everywhere(named: Live, host: str) -> None:
    for path in ("/", "/healthz", "/versions", "/predict"):
        assert_problem(named.http.get(path, headers={"Host": host}), 421, says="--allowed-hosts")


def raw(live: Live, request: str) -> bytes:
    address = urlsplit(live.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request.encode())
        return connection.recv(12)


def test_a_request_has_one_host(named: Live) -> None:
    assert raw(named, "GET /healthz HTTP/1.1\r\n\r\n") == b"HTTP/1.1 400"
    two = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert raw(named, two) == b"HTTP/1.1 400"
    assert raw(named, "GET /healthz HTTP/1.1\r\nHost: \r\n\r\n") == b"HTTP/1.1 400"
    assert raw(named, "GET /healthz HTTP/1.0\r\n\r\n") == b"HTTP/1.1 200"
    nowhere = "GET /healthz HTTP/1.0\r\nOrigin: null\r\n\r\n"
    assert raw(named, nowhere) == b"HTTP/1.1 403"


@pytest.mark.parametrize("origin", ["http://localhost:8000", "HTTPS://localhost:8000"])
def test_a_page_of_this_server_may_ask(named: Live, origin: str) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin}
    assert named.http.get("/healthz", headers=headers).status_code == 200


def test_a_page_that_was_named_may_ask_and_there_is_no_cors(named: Live) -> None:
    answer = named.http.get("/healthz", headers={"Origin": "https://app.example.org"})
    assert answer.status_code == 200
    assert [name for name in answer.headers if name.startswith("access-control")] == []


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://localhost:3000", "null", "http://localhost", "localhost:8000"],
)
def test_a_page_of_another_site_is_403(named: Live, origin: str) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin}
    answer = named.http.post("/predict", files={"files": png()}, headers=headers)
    assert_problem(answer, 403, says="--allowed-hosts https://NAME")
    preflight = {**headers, "Access-Control-Request-Method": "POST"}
    assert named.http.options("/predict", headers=preflight).status_code == 403


def test_a_star_answers_for_any_name(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent", allowed_hosts="*") as live:
        assert live.http.get("/healthz", headers={"Host": "any.example"}).status_code == 200
        assert live.http.get("/healthz", headers={"Host": "any.example:x"}).status_code == 421
