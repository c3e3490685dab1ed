from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dne_serve.access.auth import may_print_link
from dne_serve.access.permission import read_tokens
from dne_serve.cli import ENVIRONMENT_ONLY, build_parser, main
from dne_serve.settings import Settings
from model_store import __version__
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
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


def test_every_setting_is_an_option_with_help_but_the_secrets() -> None:
    text = build_parser().format_help()
    for name, field in Settings.model_fields.items():
        assert field.description
        option = re.escape(f"--{name.replace('_', '-')}")
        assert bool(re.search(rf"^  {option}\b(?!-)", text, re.MULTILINE)) == (
            name not in ENVIRONMENT_ONLY
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
    try:
        code = main(arguments)
    except SystemExit as ended:  # of the parser, which knows the choices
        code = int(str(ended.code))
    assert code == 2
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


@pytest.mark.long
def test_a_store_of_a_later_format_is_a_sentence_and_1(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"format":99,"digest":""}')
    code, said = run("--port", "0", "--store", str(tmp_path))
    assert code == 1
    assert said.splitlines()[-1].startswith("error: ")
    assert "format 99" in said


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A server that was ready, and was told to stop in the middle of a request."""

    url: str
    store: str
    ready_s: float
    """Processor time until it was ready, which on an idle machine is the time that passes."""
    answer: httpx.Response
    code: int
    said: str


@pytest.fixture(scope="module", params=[signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """One server for a signal: each start takes seconds."""
    store = Store.create(str(tmp_path_factory.mktemp("stopped") / "models"))
    publish_digits(store, publish_letters(store))
    with running("--store", store.location) as (process, url):
        ready_s = processor_seconds(process.pid)
        answer = ask_and_signal(process, url, request.param)
        _, said = process.communicate(timeout=20)
        return Stopped(
            url=url,
            store=store.location,
            ready_s=ready_s,
            answer=answer,
            code=process.returncode,
            said=said,
        )


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask_and_signal(
    process: subprocess.Popen[str], url: str, number: signal.Signals
) -> httpx.Response:
    """Send half an image, the signal, and then the other half."""
    image = png()

    def body() -> Iterator[bytes]:
        yield image[:20]
        time.sleep(0.1)  # for the first half to arrive
        process.send_signal(number)
        time.sleep(0.3)
        yield image[20:]

    return httpx.post(
        f"{url}/predict", content=body(), headers={"Content-Type": "image/png"}, timeout=30
    )


@pytest.mark.long
def test_it_is_ready_within_six_seconds(stopped: Stopped) -> None:
    assert stopped.ready_s < 6, f"{stopped.ready_s:.1f} s"


def test_told_to_stop_it_answers_what_is_under_way(stopped: Stopped) -> None:
    assert stopped.answer.status_code == 200
    assert stopped.answer.json()["version"] == 2
    assert stopped.code == 0


def test_the_log_says_where_what_and_which(stopped: Stopped) -> None:
    assert "starting with store" in stopped.said.splitlines()[0]  # before torch is imported
    assert stopped.url in stopped.said
    assert stopped.store in stopped.said
    assert "serving version 2" in stopped.said


def test_a_server_of_this_machine_prints_a_link_that_may_do_everything(store: Store) -> None:
    """The link's page asks for no token; no other client has one."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--store", store.location, "--collect", "unknown"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DNE_BACKEND": "torch"},
    )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
    finally:
        process.kill()
        process.communicate()
    assert re.fullmatch(r"open http://127\.0\.0\.1:\d+/label#token=[\w-]{32}\n", told)


@pytest.mark.parametrize("open_to_others", [False, True])
def test_a_server_with_tokens_or_for_others_prints_no_link(
    monkeypatch: pytest.MonkeyPatch, open_to_others: bool
) -> None:
    monkeypatch.delenv("DNE_ADMIN_TOKEN", raising=False)
    alone = Settings(store="models")
    assert may_print_link(alone, tokens=[])
    if open_to_others:
        other = Settings(store="models", host="0.0.0.0", allow_open=True)
    else:
        other = Settings(store="models", admin_token="sixteen-characters-and-more")
    assert not may_print_link(other, tokens=read_tokens(other))
