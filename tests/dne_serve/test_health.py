"""The health check of a container, against real servers."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from dne_serve.health import url_of
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.access.test_exposure import certificate
from tests.dne_serve.test_cli import running
from tests.live_server import live_server


def check(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "dne_serve.health"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.long
def test_a_server_that_speaks_https_is_healthy(
    store: Store, letters: Manifest, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    given = ("--store", store.location, "--tls-cert", str(cert), "--tls-key", str(key))
    with running(*given, trust=trust) as (_, url):
        port = url.rpartition(":")[2]
        found = check(DNE_PORT=port, DNE_TLS_CERT=str(cert))
        assert (found.returncode, found.stderr) == (0, "")
        plain = check(DNE_PORT=port)
        assert plain.returncode == 1
        assert "is not healthy" in plain.stderr


def test_a_server_that_speaks_http_is_healthy_until_it_is_gone(tmp_path: Path) -> None:
    with live_server(tmp_path / "none") as live:
        port = live.url.rpartition(":")[2]
        assert check(DNE_PORT=port, http_proxy="http://127.0.0.1:9").returncode == 0
    gone = check(DNE_PORT=port)
    assert gone.returncode == 1
    assert f"http://127.0.0.1:{port}/healthz is not healthy" in gone.stderr
    assert "Traceback" not in gone.stderr


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8000/healthz"),
        ({"DNE_HOST": "0.0.0.0", "DNE_PORT": "9"}, "http://127.0.0.1:9/healthz"),
        ({"DNE_HOST": "::1", "DNE_TLS_CERT": "c.pem"}, "https://[::1]:8000/healthz"),
    ],
)
def test_it_asks_where_the_server_listens(variables: dict[str, str], url: str) -> None:
    assert url_of(variables) == url
