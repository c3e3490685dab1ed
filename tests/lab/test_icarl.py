"""Test iCaRL: its losses, its means, and its answers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lab.methods.icarl import Icarl, IcarlOptions, binary_distilled, softmax_distilled
from model_store.errors import WrongUsage
from tests.lab.tiny import TINY, assert_same_bits, run_cell, run_killed, tiny_run

LOGITS = torch.tensor(
    [[0.5, -1.0, 2.0], [1.5, 0.0, -0.5], [-2.0, 1.0, 0.3], [0.0, 0.2, 0.1]], dtype=torch.float64
)
TAUGHT = torch.tensor([[1.0, -1.0], [0.5, 2.0], [-1.0, 0.0], [3.0, 0.1]], dtype=torch.float64)
LABELS = torch.tensor([2, 0, 1, 2])
BRIEF = replace(TINY, first_epochs=2, epochs=2)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_the_binary_loss_by_hand() -> None:
    expected = 0.0
    rows = zip(LOGITS.tolist(), TAUGHT.tolist(), LABELS.tolist(), strict=True)
    for logits, taught, label in rows:
        targets = [sigmoid(taught[0]), sigmoid(taught[1]), float(label == 2)]
        for logit, target in zip(logits, targets, strict=True):
            chance = sigmoid(logit)
            expected -= target * math.log(chance) + (1 - target) * math.log(1 - chance)
    found = binary_distilled(LOGITS, LABELS, TAUGHT).item()
    assert found == pytest.approx(expected / 4, rel=1e-12)


def softmax(values: list[float]) -> list[float]:
    return [math.exp(one) / sum(map(math.exp, values)) for one in values]


def test_the_softmax_loss_by_hand() -> None:
    expected = 0.0
    rows = zip(LOGITS.tolist(), TAUGHT.tolist(), LABELS.tolist(), strict=True)
    for logits, taught, label in rows:
        expected -= math.log(softmax(logits)[label])
        student = softmax([one / 2 for one in logits[:2]])
        teacher = softmax([one / 2 for one in taught])
        expected -= sum(t * math.log(s) for t, s in zip(teacher, student, strict=True))
    found = softmax_distilled(LOGITS, LABELS, TAUGHT).item()
    assert found == pytest.approx(expected / 4, rel=1e-12)


@pytest.mark.parametrize(
    "choice", ["icarl", pytest.param("icarl:loss=softmax,flip=yes", marks=pytest.mark.slow)]
)
def test_icarl_learns_three_tasks(choice: str, tmp_path: Path) -> None:
    _, lines = run_cell(choice, tmp_path)
    assert [line.classes for line in lines] == [2, 4, 6]
    assert lines[0].accuracy > 0.8
    assert lines[-1].accuracy > 2 / 6


@pytest.mark.slow
def test_icarl_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, _ = run_cell("icarl", tmp_path / "whole", preset=BRIEF)
    killed = run_killed("icarl", tmp_path / "killed", phases=1, preset=BRIEF)
    assert_same_bits(killed.method, whole.method)


@pytest.mark.parametrize("flip", ["no", "yes"])
def test_answers_are_the_nearest_mean_of_the_exemplars(flip: str, tmp_path: Path) -> None:
    run, _ = run_cell(f"icarl:flip={flip}", tmp_path, preset=BRIEF)
    method = run.method
    assert isinstance(method, Icarl)
    images = torch.randn(4, 3, 16, 16)
    features = F.normalize(method.features(images), dim=1)
    nearest = [
        min(range(6), key=lambda label: math.dist(row, method.means_CD[label].tolist()))
        for row in features.tolist()
    ]
    assert method.scores(images).argmax(dim=1).tolist() == nearest
    exemplars = run.memory.images(run.protocol.classes_until(2))
    assert exemplars is not None
    assert set(exemplars.images_by_class.values()) == {6}


@pytest.mark.parametrize("flip", ["no", "yes"])
def test_the_means_by_hand(flip: str, tmp_path: Path) -> None:
    run, _ = run_cell(f"icarl:flip={flip}", tmp_path, preset=replace(BRIEF, classes=2))
    method = run.method
    assert isinstance(method, Icarl)
    for label, (_, pixels) in enumerate(run.memory.kept.items()):
        views = [pixels, pixels[:, :, ::-1].copy()] if flip == "yes" else [pixels]
        rows = [
            [x / math.hypot(*row) for x in row]
            for view in views
            for row in run._over(view, method.features).tolist()
        ]
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        expected = [x / math.hypot(*mean) for x in mean]
        assert method.means_CD[label].tolist() == pytest.approx(expected, abs=1e-5)


def test_icarl_shares_its_first_task_by_loss() -> None:
    assert Icarl(TINY, IcarlOptions()).base == "resnet-18, binary"
    assert Icarl(TINY, IcarlOptions(loss="softmax")).base == "resnet-18, cross-entropy"


def test_icarl_without_exemplars_says_so(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="memory"):
        tiny_run("icarl", tmp_path, preset=replace(BRIEF, memory=0)).go()
