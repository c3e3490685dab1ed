"""Test the methods on frozen features: nearest class mean, linear discriminant, random ridge."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.frozen import FrozenMethod
from lab.methods.lda import Lda, LdaOptions, Sums, discriminant, ridge, squared_error
from lab.methods.ncm import Ncm, nearness, unit_mean
from tests.lab.tiny import TINY, assert_same_bits, run_cell, run_killed, tiny_run

FEATURES = torch.tensor(
    [[1.0, 2.0, 0.5], [0.0, -1.0, 2.0], [3.0, 1.0, 1.0], [2.0, 0.5, -1.0]], dtype=torch.float64
)
LABELS = torch.tensor([0, 1, 0, 1])
BRIEF = replace(TINY, first_epochs=2)
CHOICES = ["ncm", "ncm:features=raw,backbone=resnet", "lda", "lda:rule=ridge,projection=200"]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_method_on_frozen_features_learns_three_tasks(choice: str, tmp_path: Path) -> None:
    _, lines = run_cell(choice, tmp_path)
    assert [line.classes for line in lines] == [2, 4, 6]
    assert lines[0].accuracy > 0.8
    assert lines[-1].accuracy > 2 / 6


@pytest.mark.parametrize("choice", CHOICES)
def test_the_backbone_stays_bit_equal_after_the_first_task(choice: str, tmp_path: Path) -> None:
    first, _ = run_cell(choice, tmp_path, preset=replace(BRIEF, classes=2))
    last, lines = run_cell(choice, tmp_path, preset=BRIEF)
    assert lines[0].shared_base
    assert isinstance(first.method, FrozenMethod)
    assert isinstance(last.method, FrozenMethod)
    assert_same_bits(last.method.network.backbone, first.method.network.backbone)


@pytest.mark.parametrize("choice", ["ncm", "lda"])
def test_no_old_image_is_needed(choice: str, tmp_path: Path) -> None:
    with_memory, _ = run_cell(choice, tmp_path, preset=BRIEF)
    without, _ = run_cell(choice, tmp_path, preset=replace(BRIEF, memory=0))
    assert_same_bits(with_memory.method, without.method)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["ncm:backbone=resnet", "lda:rule=ridge,projection=50"])
def test_a_killed_run_goes_on_to_the_same_bits(choice: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, _ = run_cell(choice, tmp_path / "whole", preset=BRIEF)
    killed = run_killed(choice, tmp_path / "killed", phases=0, preset=BRIEF)
    assert_same_bits(killed.method, whole.method)


def test_a_finished_run_is_restored(tmp_path: Path) -> None:
    first, lines = run_cell("lda:rule=ridge,projection=50", tmp_path, preset=BRIEF)
    again = tiny_run("lda:rule=ridge,projection=50", tmp_path, preset=BRIEF)
    again.go()
    assert again.lines == lines
    assert_same_bits(again.method, first.method)


def test_an_answer_needs_the_backbone_and_the_means_only(tmp_path: Path) -> None:
    run, lines = run_cell("ncm", tmp_path, preset=BRIEF)
    assert isinstance(run.method, Ncm)
    backbone = sum(one.numel() for one in run.method.network.backbone.parameters())
    assert lines[-1].parameters == backbone + 6 * run.method.network.backbone.width


def test_the_mean_direction_by_hand() -> None:
    rows = FEATURES.tolist()
    units = [[x / math.hypot(*row) for x in row] for row in rows]
    mean = [sum(column) / 4 for column in zip(*units, strict=True)]
    expected = [x / math.hypot(*mean) for x in mean]
    assert unit_mean(FEATURES).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_largest_nearness_is_the_smallest_distance() -> None:
    means = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0]], dtype=torch.float64)
    found = nearness(FEATURES, means)
    for row, scores in zip(FEATURES.tolist(), found.tolist(), strict=True):
        distances = [math.dist(row, mean) ** 2 for mean in means.tolist()]
        shift = sum(x * x for x in row)
        assert scores == pytest.approx([shift - one for one in distances], rel=1e-12)


def no_images(classes: int = 2, width: int = 3) -> Sums:
    zeros = torch.zeros(classes, width, dtype=torch.float64)
    return Sums(
        counts_C=zeros[:, 0],
        sums_CM=zeros,
        gram_MM=torch.zeros(width, width, dtype=torch.float64),
    )


def test_sums_by_hand() -> None:
    found = no_images().plus(FEATURES, LABELS)
    rows, labels = FEATURES.tolist(), LABELS.tolist()
    assert found.counts_C.tolist() == [2, 2]
    for label in range(2):
        own = [row for row, one in zip(rows, labels, strict=True) if one == label]
        assert found.sums_CM[label].tolist() == [sum(column) for column in zip(*own, strict=True)]
    for i in range(3):
        for j in range(3):
            assert found.gram_MM[i, j].item() == sum(row[i] * row[j] for row in rows)


def test_sums_in_parts_are_the_sums_of_all() -> None:
    whole = no_images().plus(FEATURES, LABELS)
    parts = no_images().plus(FEATURES[:1], LABELS[:1]).plus(FEATURES[1:], LABELS[1:])
    assert torch.equal(whole.gram_MM, parts.gram_MM)
    assert torch.equal(whole.sums_CM, parts.sums_CM)


def test_the_discriminant_is_the_log_density_but_for_a_common_part() -> None:
    shrinkage = 0.3
    rule = discriminant(no_images().plus(FEATURES, LABELS), shrinkage)
    inverse = torch.linalg.inv(shrunk_covariance(shrinkage))
    means = [mean_of(label) for label in range(2)]
    for features, scores in zip(FEATURES, rule(FEATURES), strict=True):
        density = [-0.5 * (features - mean) @ inverse @ (features - mean) for mean in means]
        difference = (density[0] - density[1]).item()
        assert (scores[0] - scores[1]).item() == pytest.approx(difference, rel=1e-9)


def mean_of(label: int) -> Tensor:
    return FEATURES[label == LABELS].mean(dim=0)


def shrunk_covariance(shrinkage: float) -> Tensor:
    """Compute the covariance within classes by loops: N - C = 2 degrees of freedom."""
    covariance = torch.zeros(3, 3, dtype=torch.float64)
    for row, label in zip(FEATURES, LABELS.tolist(), strict=True):
        away = (row - mean_of(label)).tolist()
        for i in range(3):
            for j in range(3):
                covariance[i, j] += away[i] * away[j] / 2
    variance = sum(covariance[i, i].item() for i in range(3)) / 3
    return (1 - shrinkage) * covariance + shrinkage * variance * torch.eye(3, dtype=torch.float64)


def test_ridge_has_no_gradient_left() -> None:
    penalty = 0.5
    weight = ridge(no_images().plus(FEATURES, LABELS), penalty).weight_CM.tolist()
    for label in range(2):
        for i in range(3):
            gradient = penalty * weight[label][i]
            for row, one in zip(FEATURES.tolist(), LABELS.tolist(), strict=True):
                answer = sum(w * x for w, x in zip(weight[label], row, strict=True))
                gradient += (answer - (one == label)) * row[i]
            assert gradient == pytest.approx(0, abs=1e-12)


def test_the_squared_error_by_hand() -> None:
    scores = FEATURES[:, :2]
    asked = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    expected = sum(
        (found - one) ** 2
        for row, ones in zip(scores.tolist(), asked, strict=True)
        for found, one in zip(row, ones, strict=True)
    )
    assert squared_error(scores, LABELS).item() == pytest.approx(expected / 8, rel=1e-12)


def test_the_penalty_with_the_least_error_on_held_out_images_is_chosen() -> None:
    method = Lda(TINY, LdaOptions(rule="ridge", projection=3))
    seen = no_images().plus(FEATURES, LABELS)
    errors = {
        one: squared_error(ridge(seen, one)(FEATURES), LABELS).item() for one in method.strengths
    }
    # Images that were fitted ask for a small penalty, and their opposites for the largest.
    assert method._choose(seen, FEATURES, LABELS) == min(errors, key=lambda one: errors[one])
    assert method._choose(seen, -FEATURES, LABELS) == max(method.strengths)
