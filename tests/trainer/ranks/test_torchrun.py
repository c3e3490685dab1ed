"""Two real processes, started by torchrun, make the version that one process makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_store.codec import load_network
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.machine import know_machine
from tests.packaging.project import ROOT
from tests.trainer.folders import SIZES
from trainer.cli import main

ONCE = ("--epochs", "1", "--batch-size", "7", "--augment", "none", "--device", "cpu", "--json")


def version_in(store: Path) -> tuple[Manifest, dict[str, list[float]]]:
    opened = Store.open(str(store))
    manifest = opened.manifest(1)
    network = load_network(opened.read_shard, manifest)
    return manifest, {name: one.flatten().tolist() for name, one in network.named_parameters()}


@pytest.mark.long
def test_torchrun_makes_the_version_that_one_process_makes(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    know_machine()
    command = ["add-task", "--data", str(letters), *SIZES, *ONCE]
    assert main([*command, "--store", str(tmp_path / "alone"), "--threads", "1"]) == 0
    alone = json.loads(capsys.readouterr().out)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "trainer", *command, "--store", str(tmp_path / "shared")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1  # one answer, and one progress
    assert done.stderr.count("reading images: 24/24") == 1
    assert "learning in 2 processes, 1 thread each" in done.stderr
    shared = json.loads(done.stdout)
    assert (shared["version"], shared["promoted"]) == (1, True)
    assert shared["accuracy"] == alone["accuracy"]
    (one, weights), (two, others) = version_in(tmp_path / "alone"), version_in(tmp_path / "shared")
    assert [kept.shard for kept in two.memory] == [kept.shard for kept in one.memory]
    assert [kept.shard for kept in two.held_out] == [kept.shard for kept in one.held_out]
    for name, values in weights.items():
        assert others[name] == pytest.approx(values, abs=1e-4)
