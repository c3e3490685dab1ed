"""`dne-train add-task --on ray` with a cluster that is a shell of this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.command import Command
from tests.trainer.folders import write_classes
from trainer.cli import build_parser
from trainer.cli.commands import PATHS, sent_to_cluster
from trainer.cluster import (
    RECONNECTS,
    UPLOAD_BYTES,
    JobFailed,
    JobOutput,
    make_entrypoint,
    run_on_ray,
)

JOB = "raysubmit_1"


class FakeCluster:
    """Runs an entrypoint in a shell, with a `dne-train` that `script` stands for."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        (folder / "dne-train").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "dne-train").chmod(0o755)
        self.submitted: dict[str, Any] = {}
        self.stopped: list[str] = []
        self.status, self.message = "PENDING", ""
        self.code: int | None = None
        self.pieces: list[str] = []
        self.breaks = 0
        self.interrupts = False

    def submit_job(self, **given: Any) -> str:
        self.submitted = given
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            given["entrypoint"],
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": path},
        )
        self.pieces = [f"Running entrypoint for job {JOB}: {given['entrypoint']}\n", done.stdout]
        self.status = "SUCCEEDED" if done.returncode == 0 else "FAILED"
        self.code = done.returncode
        return JOB

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        assert job_id == JOB
        if self.interrupts:
            raise KeyboardInterrupt
        text = "".join(self.pieces)
        for at in range(0, len(text), 7):  # pieces end anywhere
            if self.breaks and at > len(text) // 2:
                self.breaks -= 1
                raise RuntimeError("connection lost")
            yield text[at : at + 7]

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(status=self.status, driver_exit_code=self.code, message=self.message)

    def stop_job(self, job_id: str) -> bool:
        self.stopped.append(job_id)
        self.status = "STOPPED"
        return True


def options_of(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["add-task", *arguments])


def follow(cluster: FakeCluster, *arguments: str) -> int:
    words = ["add-task", "--data", "images", "--on", "ray", *arguments]
    given = build_parser().parse_args(words)
    return run_on_ray(
        sent_to_cluster(given, words), address=given.ray_address, connect=lambda address: cluster
    )


def sent(cluster: FakeCluster) -> list[str]:
    """The words of the command that the cluster ran."""
    line = cluster.submitted["entrypoint"]
    return shlex.split(line[len("answer=$(") : line.index(");")])


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_job_s_exit_code_and_answer_are_those_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    script = f"echo 'epoch 1' >&2; echo told; echo '{{\"version\": 7}}'; exit {code}"
    assert follow(FakeCluster(tmp_path, script), "--json") == code
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"version": 7}
    assert out.splitlines()[0] == "told"
    assert "\nepoch 1\n" in err
    assert "told\n" not in err


def test_the_command_is_sent_without_the_cluster_s_options_and_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = FakeCluster(tmp_path, "exit 0")
    follow(cluster, "--ray-address=http://head:8265", "--name", "it's $HOME; ok", "--store", "m")
    words = sent(cluster)
    assert words[:3] == ["dne-train", "add-task", "--data"]
    assert not [word for word in words if word.startswith(("--on", "--ray"))]
    assert "it's $HOME; ok" in words
    given = build_parser().parse_args(words[1:])
    assert (given.data, given.store) == (tmp_path / "images", str(tmp_path / "m"))


def test_a_store_in_a_bucket_stays_as_it_is(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, "exit 0")
    follow(cluster, "--store", "s3://bucket/models", "--hierarchy", "folders")
    given = build_parser().parse_args(sent(cluster)[1:])
    assert (given.store, given.hierarchy) == ("s3://bucket/models", "folders")


def test_every_option_that_names_a_file_is_made_absolute() -> None:
    [commands] = [one for one in build_parser()._actions if isinstance(one.choices, dict)]
    assert isinstance(commands.choices, dict)
    actions = commands.choices["add-task"]._actions
    paths = {one.dest for one in actions if one.type is Path}
    assert paths <= PATHS.keys()
    assert {PATHS[one.dest] for one in actions if one.dest in PATHS} == set(PATHS.values())


def test_cores_and_gpus_are_reserved_and_the_person_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    cluster = FakeCluster(tmp_path, "exit 0")
    follow(cluster, "--threads", "3", "--device", "cuda")
    assert cluster.submitted["entrypoint_num_cpus"] == 3
    assert cluster.submitted["entrypoint_num_gpus"] == 1
    assert cluster.submitted["runtime_env"]["env_vars"]["LOGNAME"] == "ada"
    assert "working_dir" not in cluster.submitted["runtime_env"]


def test_ctrl_c_stops_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster(tmp_path, "exit 0")
    cluster.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        follow(cluster)
    assert cluster.stopped == [JOB]
    assert f"job {JOB} has ended: STOPPED" in capsys.readouterr().err


def test_a_lost_connection_is_made_again_and_shows_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.cluster.PAUSE_S", 0.0)
    cluster = FakeCluster(tmp_path, "for n in 1 2 3 4; do echo line $n >&2; done; echo done")
    cluster.breaks = 2
    assert follow(cluster) == 0
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert [line for line in err.splitlines() if line.startswith("line")] == [
        f"line {n}" for n in (1, 2, 3, 4)
    ]
    cluster.breaks = RECONNECTS + 1
    with pytest.raises(JobFailed, match=f"lost sight of job {JOB}, which goes on"):
        follow(cluster)


def test_a_job_that_was_killed_has_no_answer_and_says_why(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, "kill -9 $$")
    cluster.message = "out of memory"
    with pytest.raises(JobFailed, match=f"job {JOB} ended as FAILED: out of memory"):
        follow(cluster)


def test_a_small_folder_can_be_sent_and_a_large_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_classes(tmp_path / "letters", ["a", "b"], images=2)
    given = options_of("--data", str(folder), "--on", "ray", "--ray-upload")
    sent = sent_to_cluster(given, ["add-task", "--data", str(folder), "--ray-upload"])
    entrypoint = make_entrypoint(sent)
    assert entrypoint.upload == folder
    assert "--data=. --name=letters" in entrypoint.line
    with (folder / "a" / "large").open("wb") as large:
        large.truncate(UPLOAD_BYTES)
    with pytest.raises(Exception, match=r"an upload has 256 MiB at most.*leave `ray_upload` out"):
        make_entrypoint(sent)


def test_only_a_whole_line_is_the_mark() -> None:
    output = JobOutput(mark="MARK")
    assert list(output.take("run MARK\nMAR")) == ["run MARK"]
    assert list(output.take("K\nMARK\nanswer\n")) == []
    assert output.answer == "MARK\nanswer"


def test_without_ray_the_command_says_what_to_install(
    dne_train: Command, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    assert dne_train("add-task", "--data", letters, "--on", "ray") == 2
    assert dne_train.err == "error: --on ray needs Ray here too: pip install 'dne-serve[ray]'\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--ray-address", "ray://head:10001"), "is not the address of a dashboard"),
        (("--epochs", "0"), "--epochs must be more than 0"),
        (("--extend", "--quick"), "--extend adds no task"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_sent(
    dne_train: Command, letters: Path, options: tuple[str, ...], sentence: str
) -> None:
    assert dne_train("add-task", "--data", letters, "--on", "ray", *options) == 2
    assert sentence in dne_train.err
