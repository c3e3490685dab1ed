"""Learning in real processes: a rank is killed, the run is stopped, and another number goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.machine import know_machine
from tests.packaging.project import ROOT
from tests.trainer.folders import SIZES, write_classes
from tests.trainer.vit import write_vit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = ("--epochs", "400", "--batch-size", "20", "--device", "cpu")
PATIENCE_S = 240


class Runs:
    """`dne-train` in processes of its own, on one store."""

    def __init__(self, folder: Path) -> None:
        self.store, self.kept = folder / "models", folder / "kept"
        self.letters = write_classes(folder / "letters", ["a", "b"])
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "DNE_CACHE": str(folder / "c")}

    def start(self, *arguments: object, program: Sequence[str] = ()) -> subprocess.Popen[str]:
        started = program or (sys.executable, "-m")
        return subprocess.Popen(
            [*started, "trainer", *map(str, arguments), "--store", str(self.store)],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def add(self, *others: object, program: Sequence[str] = ()) -> subprocess.Popen[str]:
        where = ("--data", self.letters, "--checkpoint", self.kept)
        return self.start("add-task", *where, *SIZES, *LONG, *others, program=program)

    def versions(self) -> list[int]:
        return Store.open(str(self.store)).versions() if self.store.exists() else []

    def wait_for_epoch(self) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not any(json.loads(one.read_bytes())["epochs"] for one in self.kept.glob("*.json")):
            assert time.monotonic() < give_up, "no checkpoint was written"
            time.sleep(0.02)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    know_machine()
    return Runs(tmp_path)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def ranks_of(store: Path) -> dict[int, int]:
    """Find the processes that learn for this store: their ids by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = path.joinpath("cmdline").read_bytes().split(b"\0")
            variables = dict(
                one.partition(b"=")[::2] for one in (path / "environ").read_bytes().split(b"\0")
            )
        except OSError:
            continue
        if str(store).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(path.name)
    return found


def wait_until_gone(store: Path) -> None:
    give_up = time.monotonic() + 60
    while ranks_of(store):
        assert time.monotonic() < give_up, "a rank is left"
        time.sleep(0.1)


def goes_on(runs: Runs, processes: int) -> dict[str, object]:
    """Repeat the command in so many processes, to the end."""
    code, out, err = end(runs.add("--processes", processes, "--json"))
    assert code == 0, err
    assert "going on after epoch" in err
    answer: dict[str, object] = json.loads(out)
    return answer


@pytest.mark.parametrize(("killed", "then"), [(0, 1), (1, 3)])
def test_a_killed_rank_ends_the_run_and_another_number_of_processes_goes_on(
    runs: Runs, killed: int, then: int, scale_row: AddRow
) -> None:
    process = runs.add("--processes", 2)
    runs.wait_for_epoch()
    os.kill(ranks_of(runs.store)[killed], signal.SIGKILL)
    code, _, err = end(process)
    assert code == 1
    assert f"error: rank {killed} was ended by SIGKILL; the same command goes on" in err
    if killed:
        assert "another process of the run has ended: nothing was published; the same" in err
    wait_until_gone(runs.store)
    assert runs.versions() == []
    assert goes_on(runs, then)["version"] == 1
    scale_row(
        f"kill -9 of rank {killed} of 2", f"then {then}", "exit 1, nothing published, went on"
    )


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_the_command_stops_all_ranks(
    runs: Runs, sent: signal.Signals, scale_row: AddRow
) -> None:
    process = runs.add("--processes", 2)
    runs.wait_for_epoch()
    process.send_signal(sent)
    code, _, err = end(process)
    wait_until_gone(runs.store)
    assert runs.versions() == [], err
    if sent != signal.SIGKILL:
        assert code == 1
        assert err.count("interrupted: nothing was published; the same command goes on after") == 1
    assert goes_on(runs, 2)["version"] == 1
    scale_row(f"{sent.name} to the command", "two processes", "no rank left, went on")


def test_torchrun_ends_when_a_rank_is_killed(runs: Runs, scale_row: AddRow) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "-m"]
    process = runs.add(program=torchrun)
    runs.wait_for_epoch()
    os.kill(ranks_of(runs.store)[1], signal.SIGKILL)
    code, _, err = end(process)
    assert code == 1
    assert "Signal 9 (SIGKILL)" in err
    wait_until_gone(runs.store)
    assert runs.versions() == []
    assert goes_on(runs, 1)["version"] == 1
    scale_row("torchrun, kill -9 of rank 1", "then one process", "exit 1, nothing published")


def test_ranks_with_other_images_or_options_are_refused(
    runs: Runs, tmp_path: Path, scale_row: AddRow
) -> None:
    other = write_classes(tmp_path / "other", ["a", "b"], seed=1)
    script = tmp_path / "differs.py"
    script.write_text(
        "import os, sys\nfrom trainer.cli import main\n"
        "rank = os.environ['RANK']\n"
        "given = [one.replace('DATA0', sys.argv[1]).replace('DATA1', sys.argv[2])"
        " for one in sys.argv[4:]]\n"
        "sys.exit(main(given + (sys.argv[3].split() if rank == '1' else [])))\n"
    )

    def run(differs: str) -> tuple[int, str, str]:
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"]
        command = [*torchrun, str(script), str(runs.letters), str(other), differs, "add-task"]
        command += ["--data", "DATA0", *SIZES, "--epochs", "1", "--store", str(runs.store)]
        done = subprocess.run(
            command, env=runs._environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    code, _, err = run(f"--data {other}")
    assert code == 1
    assert "error: rank 1 has other data than rank 0: images " in err
    code, _, err = run("--seed 3")
    assert code == 1
    assert "rank 1 has other options than rank 0: seed 3, not None" in err
    assert runs.versions() == []
    scale_row("ranks with other images or options", "torchrun", "refused by name")


def test_a_quick_task_and_its_expert_are_learnt_by_two_processes(
    runs: Runs, tmp_path: Path, scale_row: AddRow
) -> None:
    vit = write_vit(tmp_path / "vit.safetensors")
    begin = ("--data", runs.letters, "--pretrained", vit, "--epochs", 1, "--device", "cpu")
    code, _, err = end(runs.start("add-task", *begin, "--processes", 2))
    assert code == 0, err
    digits = write_classes(tmp_path / "digits", ["0", "1"])
    later = ("--data", digits, "--epochs", 1, "--no-quick", "--force", "--device", "cpu", "--json")
    code, out, err = end(runs.start("add-task", *later, "--processes", 2))
    assert code == 0, err
    assert json.loads(out)["deeper"]["version"] == 3
    wait_until_gone(runs.store)
    assert runs.versions() == [1, 2, 3]
    scale_row("pre-trained start, quick task, its expert", "two processes", "three versions")
