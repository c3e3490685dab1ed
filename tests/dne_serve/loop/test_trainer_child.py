"""`--with-trainer`: a worker beside the server that lives and ends with it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from dne_serve.loop.trainer_child import (
    MAX_SHORT_LIVES,
    NICENESS,
    TrainerChild,
    worker_command,
    worker_environment,
)
from dne_serve.settings import SECRETS
from model_store.errors import WrongUsage
from model_store.host.machine import usable_cores
from tests.live_server import live_server, wait_for

SLEEPS = "import sys; sys.stdin.read()"


def child(code: str, **options: float) -> TrainerChild:
    command = [sys.executable, "-S", "-c", code]
    return TrainerChild(command, environment=dict(os.environ), **options)  # type: ignore[arg-type]


def test_the_worker_works_on_the_same_store_and_leaves_a_core() -> None:
    command = worker_command(store="s3://bucket/models", channel="staging")
    assert command[0].endswith("dne-train")
    assert command[1:3] == ["worker", "--until-stdin-closes"]
    assert command[3:7] == ["--store", "s3://bucket/models", "--channel", "staging"]
    surroundings = worker_environment({"PATH": "/bin", "DNE_DEVICE": "cpu"}, secrets=SECRETS)
    assert (surroundings["PATH"], surroundings["DNE_DEVICE"]) == ("/bin", "cpu")
    assert surroundings["OMP_NUM_THREADS"] == str(max(1, usable_cores() - 1))


@pytest.mark.parametrize(
    "name",
    [
        *(f"DNE_{name.upper()}" for name in sorted(SECRETS)),
        "DNE_ADMIN_TOKEN_FILE",
        "DNE_TOKEN_FILE",
        "DNE_LABEL_STUDIO_TOKEN",
    ],
)
def test_the_worker_inherits_no_secret(name: str) -> None:
    assert name not in worker_environment({name: "secret"}, secrets=SECRETS)


def test_without_the_command_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(WrongUsage, match="dne-train worker"):
        worker_command(store="x", channel="production")


def test_a_worker_that_dies_is_started_again_and_ends_with_the_server() -> None:
    trainer = child(SLEEPS, first_pause_s=0.01)
    trainer.start()
    wait_for(lambda: trainer.pid is not None)
    first = trainer.pid
    assert first is not None
    wait_for(lambda: os.getpriority(os.PRIO_PROCESS, first) == NICENESS)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: trainer.pid not in (None, first))
    second = trainer.pid
    assert second is not None
    trainer.stop()
    assert trainer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_a_worker_that_cannot_live_is_given_up_and_says_why(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = child("raise SystemExit('no such \x1b[2Jstore')", first_pause_s=0.0)
    trainer.start()
    wait_for(lambda: "is not restarted" in caplog.text)
    assert caplog.text.count("starts again") == MAX_SHORT_LIVES - 1
    assert caplog.text.count("the trainer ended with 1: no such  [2Jstore") == MAX_SHORT_LIVES - 1
    assert "the last time it ended with 1: no such" in caplog.text
    assert capfd.readouterr().err.count("no such") == MAX_SHORT_LIVES  # as it came
    trainer.stop()


def test_the_server_starts_the_worker_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the command writes down how it was called, and waits for its end."""
    written = tmp_path / "called.json"
    stand_in = tmp_path / "dne-train"
    stand_in.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\n"
        f"open({str(written)!r} + '.new', 'w').write(json.dumps([os.getpid(), sys.argv[1:]]))\n"
        f"os.rename({str(written)!r} + '.new', {str(written)!r})\nsys.stdin.read()\n"
    )
    stand_in.chmod(0o755)
    real = sys.executable
    monkeypatch.setattr("dne_serve.loop.trainer_child.sys.executable", str(tmp_path / "python"))
    with live_server(tmp_path / "models", with_trainer=True):
        monkeypatch.setattr("dne_serve.loop.trainer_child.sys.executable", real)
        wait_for(written.exists)
        pid, arguments = json.loads(written.read_text())
        assert arguments[0] == "worker"
        assert str(tmp_path / "models") in arguments
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
