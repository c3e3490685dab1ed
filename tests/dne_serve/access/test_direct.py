"""The inbox is open without a token to programs of this machine only, not through a proxy."""

from __future__ import annotations

import logging
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from dne_serve.access.auth import check_exposure
from dne_serve.access.permission import Permission
from dne_serve.app import create_app
from dne_serve.http.scoped_route import every_route, permission_of
from dne_serve.settings import Settings, load_settings
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.dne_serve.fake_engine import FakeEngine
from tests.live_server import Live, assert_problem, live_server, wait_for
from tests.s3_server import free_ports

PROXIED = [
    {"Forwarded": "for=203.0.113.7"},
    {"Via": "1.1 proxy"},
    {"X-Forwarded-For": "203.0.113.7"},
    {"x-forwarded-proto": "https"},
    {"X-Forwarded-Something-New": "1"},
    {"X-Real-IP": "203.0.113.7"},
    {"X_Forwarded_For": "203.0.113.7"},
    {"X-Original-Forwarded-For": "203.0.113.7"},
    {"CF-Connecting-IP": "203.0.113.7"},
    {"True-Client-IP": "203.0.113.7"},
    {"X-Azure-ClientIP": "203.0.113.7"},
    {"X-ProxyUser-Ip": "203.0.113.7"},
    {"X-Remote-Addr": "203.0.113.7"},
    {"X-Envoy-External-Address": "203.0.113.7"},
    {"X-Envoy-Expected-Rq-Timeout-Ms": "15000"},
    {"X-Original-Host": "shop.example"},
    {"CDN-Loop": "cloudflare"},
    {"CF-Ray": "1"},
    {"X-Varnish": "32770"},
    {"X-Amzn-Trace-Id": "Root=1"},
    {"X-Scheme": "https"},
    {"Tailscale-User-Login": "someone@example.org"},
    {"Host": "192.0.2.1"},
    {"Host": "[2001:db8::1]:8000"},
]


def label_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield the method and a path of every route that needs `label`."""
    for route in every_route(app.routes):
        if isinstance(route, APIRoute) and permission_of(route) is Permission.LABEL:
            path = re.sub(r"\{[^}]*\}", "1", route.path)
            yield from ((method, path) for method in route.methods or ())


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("store")
    publish_letters(Store.create(str(folder)))
    with live_server(folder, admin_token=None) as live:
        live.wait_until_ready()
        yield live


def all_routes(tmp_path: Path) -> list[tuple[str, str]]:
    app = create_app(Settings(store=str(tmp_path)), engine=FakeEngine())
    routes = list(label_routes(app))
    assert len(routes) > 10
    return routes


@pytest.mark.parametrize("headers", PROXIED, ids=lambda one: str(one))
def test_a_proxied_request_needs_a_token_on_every_label_route(
    local: Live, headers: dict[str, str], tmp_path: Path
) -> None:
    for method, path in all_routes(tmp_path):
        answer = local.http.request(method, path, headers=headers)
        assert_problem(answer, 403, says="no token with the scope 'label'")


def test_a_program_of_this_machine_gets_through_every_label_route(
    local: Live, tmp_path: Path
) -> None:
    for method, path in all_routes(tmp_path):
        assert local.http.request(method, path).status_code not in (401, 403)


@pytest.mark.parametrize(
    "name", ["X-Request-Id", "X-Requested-With", "Traceparent", "User-Agent", "Origin-Agent", "If"]
)
def test_headers_that_programs_send_themselves_leave_the_inbox_open(local: Live, name: str) -> None:
    assert local.http.get("/inbox", headers={name: "a"}).status_code == 200


def test_http_1_0_needs_a_token_as_nginx_speaks_it(local: Live) -> None:
    address = urlsplit(local.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"GET /inbox HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(100).split(b" ")[1] == b"403"


@pytest.mark.parametrize(
    "given", [{"allowed_hosts": "shop.example"}, {"allowed_hosts": "https://shop.example"}]
)
def test_names_of_others_close_the_inbox(given: dict[str, Any], tmp_path: Path) -> None:
    publish_letters(Store.create(str(tmp_path)))
    with live_server(tmp_path, admin_token=None, **given) as live:
        assert_problem(live.http.get("/inbox"), 403, says="no token with the scope 'label'")


def test_collecting_without_a_token_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_exposure(load_settings(), tokens=[])
        assert not caplog.records
        check_exposure(load_settings(collect="unknown"), tokens=[])
    assert "pictures are collected and there is no token" in caplog.text


def test_a_stranger_behind_nginx_sees_no_inbox(local: Live, tmp_path: Path) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed: NO REAL PROXY WAS TRIED")
    (port,) = free_ports(1)
    (tmp_path / "nginx.conf").write_text(
        f"pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; server {{ "
        f"listen 127.0.0.1:{port}; location / {{ proxy_pass {local.url}; }} }} }}"
    )
    command = ["nginx", "-p", str(tmp_path), "-c", "nginx.conf", "-g", "daemon off;"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
        try:
            wait_for(lambda: _reaches(port))
            answer = httpx.get(f"http://127.0.0.1:{port}/inbox")
        finally:
            nginx.terminate()
    assert_problem(answer, 403, says="no token with the scope 'label'")


def _reaches(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
