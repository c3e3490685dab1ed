"""The benchmark of domains runs the real commands, here on a made-up network and domain."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from benchmarks.domains import (
    Domain,
    Made,
    drawn,
    figures_of,
    lay_out,
    learn,
    measured_of,
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


def test_the_quick_form_learns_a_domain_with_the_commands(tmp_path: Path) -> None:
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


def test_its_options_have_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.domains", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    for option in ("--data", "--cifar", "--pretrained", "--json", "--seeds", "--at-once"):
        assert option in done.stdout


def test_the_committed_result_is_one_object() -> None:
    result = json.loads((ROOT / "benchmarks/results/domains.json").read_text())
    assert {"machine", "figures", "measured"} <= set(result)
