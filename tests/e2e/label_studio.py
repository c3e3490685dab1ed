"""A real Label Studio 1.23 on a free port, with a database and files of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.live_server import wait_for

ROOT = Path(__file__).resolve().parents[2]
START_S = 1200.0
"""It makes its database first, which takes minutes on a busy machine."""
BUSY = {
    "ML_CONNECTION_TIMEOUT": "20",
    "ML_TIMEOUT_HEALTH": "20",
    "ML_TIMEOUT_SETUP": "20",
    "WEBHOOK_TIMEOUT": "20",
}
"""Machines that run tests may be busy; Label Studio waits a second by default."""
TOKEN = "0123456789abcdef0123456789abcdef01234567"
USER = "anna@example.org"
GIVEN = os.environ.get("DNE_LABEL_STUDIO_BIN")
"""Read before the tests' own surroundings take away all variables of DNE_."""


def find_command() -> Path | None:
    """Find `label-studio`: as given, on the path, or where `make test` puts it."""
    places = (GIVEN, shutil.which("label-studio"), ROOT / ".tools-label-studio/bin/label-studio")
    found = [Path(one) for one in places if one and Path(one).exists()]
    return found[0].absolute() if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RealLabelStudio:
    """The server, a client with a legacy token, and the Python that has the SDK."""

    url: str
    http: httpx.Client
    python: Path
    log: Path

    def json(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = self.http.request(method, path, json=body, params=query)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:1000]}"
        return answer.json() if answer.content else None

    def tasks(self, project: int) -> list[dict[str, Any]]:
        """All tasks with annotations and predictions, the lowest prediction score first."""
        query = json.dumps({"ordering": ["tasks:predictions_score"]})
        found = self.json("GET", "/api/tasks/", project=project, fields="all", query=query)
        tasks: list[dict[str, Any]] = found["tasks"]
        return tasks

    def run_sdk(self, script: str, **given: Any) -> Any:
        """Run a script with `label_studio_sdk`; it reads `given` and prints JSON on its last
        line."""
        done = subprocess.run(
            [str(self.python), "-c", script, json.dumps({"url": self.url, **given})],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def real_label_studio(command: Path, folder: Path) -> Iterator[RealLabelStudio]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    log = folder / "log"
    own = {
        "HOME": str(folder),
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder / "data"),
        "ML_BLOCK_LOCAL_IP": "false",
        **BUSY,
        "SSRF_PROTECTION_ENABLED": "false",
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
        "SENTRY_DSN": "",
    }
    kept = {name: value for name, value in os.environ.items() if name[:3] != "SSL"}
    kept.pop("PYTHONPATH", None)
    with log.open("wb") as written:
        process = subprocess.Popen(
            [
                *(str(command), "start", "--no-browser", "--internal-host", "127.0.0.1"),
                *("--port", str(port), "--username", USER, "--password", "a-password-42"),
                *("--user-token", TOKEN, "--enable-legacy-api-token", "--log-level", "INFO"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**kept, **own},
            cwd=folder,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        headers = {"Authorization": f"Token {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=120) as http:
            wait_for(lambda: _is_up(http, process, log), seconds=START_S)
            python = command.resolve().parent / "python"
            yield RealLabelStudio(url=url, http=http, python=python, log=log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return http.get("/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
