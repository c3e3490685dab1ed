"""The commands of the lab name what they do not know, and a campaign goes on after a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab import cli, results
from lab.plan import Planned
from lab.report.page import Part, make_report
from tests.lab.synthetic import SETTINGS, course, write_zip
from tests.packaging.project import ROOT

BEST = ((0.8,), (0.6, 0.9), (0.5, 0.7, 1.0))
SETTING = ",".join(sorted(SETTINGS))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["dnee"], "method 'dnee' is not one of dne"),
        (["dne:heads=2"], "dne has no option 'heads'; its options: k, network"),
        (["dne:k=two"], "option k of dne must be a whole number, not 'two'"),
        (["dne:tuning=all"], "must be one of ours, authors, none, not 'all'"),
        (["dne", "--preset", "tiny"], "preset 'tiny' is not one of paper, short"),
        (["dne", "--set", "memry=3"], "no setting 'memry'; the settings: first, step, memory"),
        (["dne", "--data", "nowhere.zip"], "--data nowhere.zip is not a file"),
    ],
)
def test_what_is_not_known_is_told_with_what_is(
    asked: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "--data", "data.zip", *asked]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--seeds", "-1"], ["--seeds", "one"]])
def test_counts_are_whole_numbers(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", "dne", "--data", "data.zip", *wrong])


def test_a_report_is_written_beside_its_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "mini.jsonl", tmp_path / "docs" / "page.md"
    for line in course(*BEST):
        results.append(path, line)
    path.write_bytes(path.read_bytes() + b'{"method"')
    assert cli.main(["report", "--results", str(path), "--out", str(out)]) == 0
    answer = capsys.readouterr()
    assert "torn" in answer.err
    assert [Path(one).exists() for one in answer.out.split()] == [True] * 6
    assert "(page/mini-cost.svg)" in out.read_text()
    assert out.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.jsonl"
    assert cli.main(["report", "--results", str(path)]) == 1
    assert "none.jsonl cannot be read" in capsys.readouterr().err
    path.touch()
    assert cli.main(["report", "--results", str(path)]) == 2
    assert "there are no results in" in capsys.readouterr().err


def test_the_plan_lists_cells_with_their_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mini.jsonl"
    for line in [*course(*BEST), *course(*BEST[:1], seed=1)]:
        results.append(path, line)
    assert cli.main(["plan", "--preset", "mini", "--results", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    states = {tuple(line.split("  ")[0:1]) for line in table}
    assert {("done",), ("unfinished",), ("missing",)} <= states
    assert any(line.split()[:6] == ["unfinished", "DNE", "k", "=", "1", "1"] for line in table)
    assert "cells to run" in table[-1]


@pytest.mark.long
def test_a_campaign_runs_what_is_missing_in_the_order_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_zip(tmp_path / "data.zip"), tmp_path / "mini.jsonl"
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    rows = [
        Planned(choice="dne", title="DNE", seeds=(0,), setting=SETTING),
        Planned(choice="dne:k=2", title="two", seeds=(0,), setting=SETTING),
        Planned(choice="strange", title="strange", seeds=(0,)),
    ]
    monkeypatch.setattr(cli, "plan_of", lambda preset: rows[:1] + rows[2:])
    given = ["campaign", "--data", str(data), "--preset", "mini", "--out", str(out), "--jobs", "1"]
    assert cli.main(given) == 0
    told = capsys.readouterr().err
    assert "left out: strange: method 'strange' is not one of dne" in told
    monkeypatch.setattr(cli, "plan_of", lambda preset: rows)
    assert cli.main(given) == 0
    lines = results.read([out], note=print)
    assert [(line.variant, line.task) for line in lines] == [
        (variant, task) for variant in ("", "k=2") for task in range(3)
    ]
    assert "1 cell to run; 1 of unknown length" in capsys.readouterr().err
    before = out.read_bytes()
    assert cli.main(given) == 0
    assert out.read_bytes() == before
    part = Part(preset="mini", lines=lines, plan=rows)
    page = make_report([part], folder="x").markdown
    assert "| two |" in page


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_stopped_campaign_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    data, out = write_zip(tmp_path / "data.zip"), tmp_path / "mini.jsonl"
    command = [
        sys.executable, "-m", "lab", "compare", "dne", "dne:k=2", "--seeds", "0", "1",
        "--data", str(data), "--preset", "mini", "--out", str(out), "--jobs", "2",
        "--set", *SETTINGS, "first_epochs=50",
    ]  # fmt: skip
    surroundings = {**os.environ, "DNE_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=surroundings,
        # A shell's background jobs ignore SIGINT, and so would a command that a test starts there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while not list((tmp_path / "cache").rglob("checkpoints/*/*.json")):
            time.sleep(0.1)
        children = _children(process.pid)
        process.send_signal(number)
        assert process.wait() == 1
    assert len(children) == 2
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    subprocess.run(command, cwd=ROOT, env=surroundings, check=True, capture_output=True)
    lines = results.read([out], note=print)
    assert len(lines) == 4 * 3
    assert any(line.resumed for line in lines)


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(one) for one in text.split()]
