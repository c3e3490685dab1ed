"""Real digits from scratch, as a new user learns them: the gate promotes both tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.trainer.command import Command


def write_digits(folder: Path, digits: range, *, held_out: bool = False) -> Path:
    """Write images of 8 × 8 pixels; every third one is held out."""
    bunch = load_digits()
    for index, (pixels, digit) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        if digit in digits and (index % 3 == 0) == held_out:
            place = folder / f"digit_{digit}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype("uint8")).save(place / f"{index}.png")
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_six_digits_and_then_four_are_promoted_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Command(tmp_path / "models", capsys)
    for digits in (range(6), range(6, 10)):
        data = write_digits(tmp_path / f"from-{digits.start}", digits)
        assert run("add-task", "--data", data, "--preset", "tiny") == 0, run.err
    test = write_digits(tmp_path / "test", range(10), held_out=True)
    assert run("evaluate", "--data", test, "--json") == 0, run.err
    judged = json.loads(run.out.splitlines()[-1])
    assert (judged["version"], len(judged["per_class"])) == (2, 10)
    assert judged["accuracy"]["all"] >= 0.93
