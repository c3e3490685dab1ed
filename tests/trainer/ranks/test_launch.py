"""`--processes N` starts ranks, and ends with what they say. The ranks here are a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_store.errors import WrongUsage
from tests.trainer.command import Command
from trainer.ranks import launch as launching
from trainer.ranks.launch import EXIT_LOST, RankPlace, launch, place_of

RANK = 'import os, sys, time, signal; rank = int(os.environ["RANK"])\n'


def run(script: str, *, processes: int = 3) -> int:
    return launch([], processes=processes, program=("-c", RANK + script))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.3)


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_that_agree_end_with_their_code(code: int) -> None:
    assert run(f"sys.exit({code})") == code


def test_only_the_first_rank_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run('print("answer", rank); print("note", rank, file=sys.stderr)') == 0
    assert capfd.readouterr() == ("answer 0\n", "note 0\n")


def test_the_same_fault_of_all_ranks_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run('print("error: no such folder", file=sys.stderr); sys.exit(2)') == 2
    assert capfd.readouterr().err == "error: no such folder\n"


def test_the_fault_of_another_rank_is_told_with_its_number(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = f"""
if rank == 1:
    print("error: a bad disk", file=sys.stderr)
    sys.exit(1)
sys.exit({EXIT_LOST})"""
    assert run(script) == 1
    assert capfd.readouterr().err == "error: rank 1 ended with 1: a bad disk\n"


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run_and_leaves_no_process(
    tmp_path: Path, killed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"""
open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
if rank == {killed}:
    os.kill(os.getpid(), 9)
time.sleep(60)"""
    began_s = time.monotonic()
    assert run(script) == 1
    assert time.monotonic() - began_s < 20
    assert f"error: rank {killed} was ended by SIGKILL" in capfd.readouterr().err
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# A shell's background jobs ignore SIGINT, and so would a command that a test starts in one.
STARTS = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from trainer.ranks.launch import launch
sys.exit(launch([], processes=2, program=("-c", {RANK!r} + sys.argv[1])))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_reach_every_rank_once(tmp_path: Path, sent: signal.Signals) -> None:
    script = f"""
def ended(*_):
    open(os.path.join({str(tmp_path)!r}, f"ended {{rank}}"), "x").close()
    sys.exit(1)
signal.signal(signal.SIGTERM, ended)
open(os.path.join({str(tmp_path)!r}, f"began {{rank}}"), "x").close()
time.sleep(60)"""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, script], env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    try:
        wait_for(tmp_path, "began 0", "began 1")
        process.send_signal(sent)
        assert process.wait(30) == 1
    finally:
        process.kill()
    wait_for(tmp_path, "ended 0", "ended 1")


def wait_for(folder: Path, *names: str) -> None:
    give_up = time.monotonic() + 30
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < give_up, sorted(path.name for path in folder.iterdir())
        time.sleep(0.02)


def test_a_place_is_read_as_it_was_said() -> None:
    place = RankPlace(rank=1, ranks=3, local_rank=1, local_ranks=3, meeting=Path("here"))
    assert place_of(place.variables()) == place
    assert place_of({}) is None
    assert place_of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    for wrong in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "x", "RANK": "0"}):
        with pytest.raises(WrongUsage, match="torchrun"):
            place_of(wrong)
    with pytest.raises(WrongUsage, match="RANK is 2, and WORLD_SIZE 2"):
        place_of({"WORLD_SIZE": "2", "RANK": "2"})


def test_numbers_of_processes_that_make_no_sense_are_wrong_usage(
    dne_train: Command, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("0", "-1", "9999"):
        assert dne_train("add-task", "--data", letters, "--processes", number) == 2
        assert f"--processes must be between 1 and 1024, not {number}" in dne_train.err
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert dne_train("add-task", "--data", letters, "--processes", 2) == 2
    assert "torchrun has started 3" in dne_train.err
    assert dne_train.versions == []


@pytest.mark.parametrize("command", [("evaluate", "--data", "x"), ("report", "1", "--out", "x")])
def test_torchrun_is_refused_by_commands_that_one_process_does(
    dne_train: Command, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert dne_train(*command) == 2
    assert f"{command[0]} runs in one process: start it without torchrun" in dne_train.err
