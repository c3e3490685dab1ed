"""The benchmark of domains runs the real commands, here on a made-up network and domain."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from benchmarks.domains import (
    Domain,
    Made,
    Run,
    add_run,
    drawn,
    figures_of,
    lay_out,
    learn,
    main,
    measured_of,
    proposal_figures,
    run_of,
    runs_in,
    serving_of,
)
from tests.packaging.project import ROOT
from tests.trainer.vit import made_up

TINY = Domain(name="tiny", tasks=(2, 2), images=12, tested=4)


def write_domain(path: Path) -> None:
    """Five classes of one colour each, with noise."""
    draw = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for place in range(5):
            colour = draw.integers(0, 255, size=3)
            for part, count in (("train", 12), ("test", 4)):
                for number in range(count):
                    noise = draw.normal(0, 60, size=(8, 8, 3))
                    pixels = np.clip(colour + noise, 0, 255).astype(np.uint8)
                    content = io.BytesIO()
                    Image.fromarray(pixels).save(content, format="PNG")
                    name = f"tiny/{part}/class-{place}/{number}.png"
                    archive.writestr(name, content.getvalue())


def test_the_quick_form_learns_a_domain_with_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, vit, place = tmp_path / "data.zip", tmp_path / "vit.safetensors", tmp_path / "run"
    write_domain(archive)
    save_file(made_up(), vit)
    laid = lay_out(TINY, archive, place, prefix="tiny/", seed=0)
    assert [len(list(task.iterdir())) for task in laid.tasks] == [2, 2]
    assert laid.strange is not None
    adapts = ("--grow", "adapt", "--epochs", "1")
    start = ("--pretrained", str(vit), "--attention-heads", "2", "--readout", "wide", *adapts)
    run = learn(TINY, laid, place, start=start)
    assert len(run.by_task) == 2
    assert 0 <= run.accuracy <= 100
    assert run.readout == "wide"
    assert run.auroc is not None
    assert 0 <= run.called_unknown <= 1
    assert run.growing_seconds > 0
    assert {figure.name for figure in figures_of([run])} >= {"tasks refused by the gate"}
    assert measured_of([run])["tiny: accuracy, %"] == run.accuracy
    assert [one.task for one in run.versions] == [1, 1, 2]
    assert [one.grown for one in run.versions] == [False, True, False]
    # Whole tasks of a run that was stopped are not learnt again.
    monkeypatch.setattr("benchmarks.domains.command", None)
    assert learn(TINY, laid, place, start=start) == run


def test_all_classes_at_once_are_the_same_images_as_one_task(tmp_path: Path) -> None:
    archive = tmp_path / "data.zip"
    write_domain(archive)
    by_task = lay_out(TINY, archive, tmp_path / "by-task", prefix="tiny/", seed=0)
    (whole,) = lay_out(
        drawn(TINY, tasks=(4,), images=None), archive, tmp_path / "whole", prefix="tiny/", seed=0
    ).tasks

    def images(*tasks: Path) -> set[tuple[str, bytes]]:
        return {
            (image.parent.name, image.read_bytes()) for task in tasks for image in task.glob("*/*")
        }

    assert images(whole) == images(*by_task.tasks)


def made(version: int, *, promoted: bool, grown: bool = False, **more: float) -> Made:
    return Made(
        version=version,
        task=1,
        grown=grown,
        promoted=promoted,
        proposed=True,
        accuracy=more.get("accuracy", 50.0),
        held_out=50.0,
        calibration=0.01,
        auroc=None,
        called_unknown=0.05,
        seconds=1.0,
        chance=0.01,
    )


def test_a_grown_version_serves_before_its_quick_one_and_a_refused_one_never() -> None:
    quick, grown = made(1, promoted=True), made(2, promoted=True, grown=True)
    assert serving_of([quick, grown]) == grown
    assert serving_of([made(1, promoted=False), grown]) == grown
    left = made(2, promoted=False, grown=True)
    assert serving_of([quick, left]) == quick
    assert serving_of([made(1, promoted=False), left]).version == 1


def run_of_versions(*versions: Made) -> Run:
    return Run(
        domain="tiny",
        seed=0,
        accuracy=50.0,
        by_task=(50.0,),
        held_out=50.0,
        calibration=0.01,
        auroc=None,
        called_unknown=0.05,
        refused=0,
        grown=1,
        seconds=1.0,
        growing_seconds=1.0,
        readout="wide",
        fit="lda",
        versions=versions,
    )


def test_proposals_are_compared_with_what_growing_gained() -> None:
    def draw(gain: float, *, proposed: bool) -> Run:
        quick = replace(made(1, promoted=True, accuracy=60.0), proposed=proposed)
        return run_of_versions(quick, made(2, promoted=True, grown=True, accuracy=60 + gain))

    runs = [draw(6, proposed=True), draw(1, proposed=True), draw(5, proposed=False)]
    gained, proposed = proposal_figures([*runs, run_of_versions(made(1, promoted=True))])
    assert (gained.name, gained.value) == ("share of 2 proposals that gained 2 points", 0.5)
    assert proposed.name == "share of 2 gains of 5 points that were proposed"
    assert (proposed.value, proposed.reached) == (0.5, False)


def test_a_campaign_makes_no_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into, archive = tmp_path / "runs.json", tmp_path / "data.zip"
    write_domain(archive)
    monkeypatch.setattr("benchmarks.domains._asked", lambda _: [(TINY, archive, "tiny/")])
    learnt: list[str] = []

    def command(module: str, name: str, *arguments: object, store: Path) -> dict[str, object]:
        learnt.append(name)
        raise SystemExit("stopped")

    monkeypatch.setattr("benchmarks.domains.command", command)
    options = ["--pretrained", "vit.safetensors", "--into", str(into), "--work", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["domains", *options])
    with pytest.raises(SystemExit, match="stopped"):
        main()
    assert learnt == ["add-task"]
    whole, name = made(1, promoted=True), "tiny 2+2 x 12, vit, seed 0"
    assert (tmp_path / "tiny-2+2-x-12-vit-seed-0" / "task-1").is_dir()
    add_run(into, name, run_of_versions(whole))
    assert main() == 0
    assert learnt == ["add-task"]
    assert run_of(runs_in(into)[name]) == run_of_versions(whole)


def test_its_options_have_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.domains", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    for option in (
        "--data",
        "--cifar",
        "--pretrained",
        "--json",
        "--seeds",
        "--at-once",
        "--into",
        "--work",
    ):
        assert option in done.stdout


def test_the_committed_result_is_one_object() -> None:
    result = json.loads((ROOT / "benchmarks/results/domains.json").read_text())
    assert {"machine", "figures", "measured"} <= set(result)
    runs = [run_of(one) for one in result["runs"].values()]
    assert all(
        run.accuracy == pytest.approx(serving_of(run.versions).accuracy, abs=0.1)
        for run in runs
        if len(run.by_task) == 1
    )
    assert proposal_figures(runs)
