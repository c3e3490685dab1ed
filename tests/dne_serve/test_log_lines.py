"""One record of the log is one line, whatever clients send."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from dne_serve.log_lines import FORMAT, JsonLine, OneLine, StderrHandler, on_one_line
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.test_cli import running
from tests.live_server import TOKEN, Live, png

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: .*")
FORGED = "2026-01-01 00:00:00,000 INFO dne_serve: forged"
BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"]


def written(
    message: str,
    *arguments: object,
    exc_info: bool = False,
    formatter: logging.Formatter | None = None,
) -> str:
    stream = io.StringIO()
    handler = StderrHandler(stream)
    handler.setFormatter(formatter or OneLine(FORMAT))
    logger = logging.Logger("a.test")
    logger.addHandler(handler)
    logger.error(message, *arguments, exc_info=exc_info)
    return stream.getvalue()


@pytest.mark.parametrize("mark", [*BREAKS, "\x1b[2J", "\x00", "\x7f", "\u202e", "\ud800"])
def test_what_would_break_a_line_or_a_terminal_is_escaped(mark: str) -> None:
    said = written("one %s", f"a{mark}{FORGED}")
    assert RECORD.fullmatch(said.removesuffix("\n"))
    assert len(said.splitlines()) == 1
    assert mark not in said.removesuffix("\n")
    said.encode()


def test_usual_text_stays_as_it_is() -> None:
    said = r"größe 図 🙂 C:\path"
    assert on_one_line(said) == said


@pytest.mark.parametrize("mark", [*BREAKS, "\x1b[2J", "\x00", '"}', "\ud800"])
def test_a_json_line_is_one_object_whatever_is_in_it(mark: str) -> None:
    try:
        raise ValueError(mark)
    except ValueError:
        said = written("one %s", mark, exc_info=True, formatter=JsonLine())
    assert len(said.splitlines()) == 1
    line = json.loads(said)
    assert line["message"] == f"one {mark}"
    assert line["traceback"].endswith(f"ValueError: {mark}")
    assert line["time"].endswith("Z")


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3", True), ("", False), ("a b", False), ("x" * 129, False)]
)
def test_a_request_keeps_its_id_if_it_is_harmless(
    steady: Live, caplog: pytest.LogCaptureFixture, sent: str, kept: bool
) -> None:
    with caplog.at_level("DEBUG", "dne_serve.requests"):
        answer = steady.http.get("/nothing", headers={"X-Request-Id": sent})
    given = answer.headers["x-request-id"]
    assert (given == sent) == kept
    facts = next(one for one in caplog.records if "unmatched" in one.getMessage()).facts  # type: ignore[attr-defined]
    assert (facts["request_id"], facts["status"]) == (given, 404)
    assert facts["instance"] == answer.json()["instance"]


def test_a_traceback_is_on_the_line_of_its_record() -> None:
    try:
        raise ValueError(f"first\n{FORGED}")
    except ValueError:
        said = written("it failed", exc_info=True)
    assert RECORD.fullmatch(said.removesuffix("\n"))
    assert r"Traceback (most recent call last):\n" in said
    assert rf"ValueError: first\n{FORGED}" in said


def test_a_record_that_cannot_be_written_is_told_of_in_one_line() -> None:
    told = io.StringIO()
    with redirect_stderr(told):
        assert written("%d", f"x\n{FORGED}") == ""
    assert len(told.getvalue().splitlines()) == 1
    assert "a record of a.test was lost" in told.getvalue()


def test_threads_warnings_and_destructors_speak_through_the_log() -> None:
    program = f"""
import threading, warnings
from dne_serve.log_lines import set_up_log
set_up_log("info")
def fail(): raise ValueError("a\\n{FORGED}")
one = threading.Thread(target=fail); one.start(); one.join()
warnings.warn("b\\n{FORGED}")
class Dies:
    def __del__(self): raise ValueError("c\\n{FORGED}")
Dies()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 3, done.stderr
    assert all(RECORD.fullmatch(line) for line in lines)


@pytest.mark.long
def test_no_request_forges_a_record(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DNE_ADMIN_TOKEN", TOKEN)
    forged = f"a\n{FORGED}"
    audit = tmp_path / "audit"
    with running("--store", store.location, "--audit-log", str(audit)) as (process, url):
        admin = {"Authorization": f"Bearer {TOKEN}"}
        httpx.post(f"{url}/predict", json={"images": [], forged: 1})
        httpx.post(f"{url}/predict", json={"images": [{"data": "x", forged: 1}]})
        httpx.post(f"{url}/predict", files=[("files", (forged, png()[:60]))])
        httpx.post(f"{url}/rollback", json={forged: 1}, headers=admin)
        httpx.post(f"{url}/v2/models/dne/infer", json={"inputs": [{forged: 1}]})
        httpx.get(f"{url}/{quote(forged)}")
        process.terminate()
        _, said = process.communicate(timeout=20)
    lines = said.splitlines()
    assert [line for line in lines if not RECORD.fullmatch(line)] == []
    assert [line for line in lines if line.startswith(FORGED)] == []
    assert len(audit.read_text().splitlines()) == 1
