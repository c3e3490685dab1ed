from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dne_serve.cli import build_parser, main
from dne_serve.settings import Settings
from model_store import __version__
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import png

COMMAND = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")


@contextmanager
def running(
    *arguments: str, trust: ssl.SSLContext | bool = True
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own process, on a free port, once it is ready."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DNE_BACKEND": "torch"},  # nothing is measured
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        while not _ready(url, trust):
            time.sleep(0.02)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def _ready(url: str, trust: ssl.SSLContext | bool) -> bool:
    try:
        return httpx.get(f"{url}/readyz", verify=trust).status_code == 200
    except httpx.TransportError:
        return False


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_every_setting_is_an_option_with_help_but_the_admin_token() -> None:
    text = build_parser().format_help()
    for name, field in Settings.model_fields.items():
        assert field.description
        option = re.escape(f"--{name.replace('_', '-')}")
        assert bool(re.search(rf"^  {option}\b(?!-)", text, re.MULTILINE)) == (
            name != "admin_token"
        )


def test_version_is_that_of_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--port", "x"], ["--backend", "x"], ["--channel", "a/b"], ["--max-batch", "0"]]
)
def test_wrong_usage_is_a_sentence_and_2(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert arguments[0].strip("-").replace("-", "_") in said
    assert len(said.splitlines()) == 1


def test_a_port_in_use_is_a_sentence_and_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = run("--port", port, "--store", str(tmp_path))
    assert code == 1
    assert said.strip() == f"error: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_store_of_a_later_format_is_a_sentence_and_1(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"format":99,"digest":""}')
    code, said = run("--port", "0", "--store", str(tmp_path))
    assert code == 1
    assert said.startswith("error: ")
    assert "format 99" in said


def test_it_is_ready_within_six_seconds(store: Store, digits: Manifest) -> None:
    """Of processor time, which on an idle machine is the time that passes."""
    with running("--store", store.location) as (process, _):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        took = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert took < 6, f"{took:.1f} s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_answers_what_is_under_way(
    store: Store, digits: Manifest, number: signal.Signals
) -> None:
    half_sent, signalled = threading.Event(), threading.Event()
    image = png()

    def body() -> Iterator[bytes]:
        yield image[:20]
        half_sent.set()
        signalled.wait(20)
        time.sleep(0.3)
        yield image[20:]

    with running("--store", store.location) as (process, url):
        answers: list[httpx.Response] = []

        def ask() -> None:
            headers = {"Content-Type": "image/png"}
            answers.append(httpx.post(f"{url}/predict", content=body(), headers=headers))

        asking = threading.Thread(target=ask)
        asking.start()
        half_sent.wait(20)
        time.sleep(0.1)  # for the first half to arrive
        process.send_signal(number)
        signalled.set()
        asking.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["version"] == 2
        assert process.wait(10) == 0


def test_the_log_says_where_what_and_which(store: Store, digits: Manifest) -> None:
    with running("--store", store.location) as (process, url):
        process.terminate()
        _, said = process.communicate(timeout=10)
    assert url in said
    assert store.location in said
    assert "serving version 2" in said
