"""Test DER: its losses by hand, backbones that stay as they are, and runs that are killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lab.backbones import GrowingLinear
from lab.joined import widened
from lab.methods.der import Der, DerOptions, NewBackboneLoss, refit_loss
from tests.lab.striped import (
    PRESET,
    School,
    assert_a_killed_run_goes_on,
    equal,
    run_of,
    some_images,
    state_of,
)

LABELS = torch.tensor([0, 3, 2, 1])


def negative_log_probability(row: list[float], label: int) -> float:
    return -math.log(math.exp(row[label]) / sum(map(math.exp, row)))


def grown(*, tasks: int = 2) -> Der:
    torch.manual_seed(0)
    der = Der(PRESET, DerOptions())
    for _ in range(tasks):
        der.expand(("some", "others"))
    return der.eval()


def test_the_loss_is_of_all_features_and_of_new_ones_with_old_classes_as_one() -> None:
    network = grown().network
    auxiliary = nn.Linear(network.backbone.width, 3)
    step = NewBackboneLoss(auxiliary=auxiliary, old=2)(network, some_images(), LABELS)
    logits = network(some_images()).tolist()
    alone = auxiliary(network.experts[1](some_images())).tolist()
    plain = 0.0
    for row, other, label in zip(logits, alone, LABELS.tolist(), strict=True):
        plain += negative_log_probability(row, label) / 4
        plain += negative_log_probability(other, max(0, label - 1)) / 4
    assert step.loss.item() == pytest.approx(plain, rel=1e-5)


def test_the_refit_divides_the_logits_by_five() -> None:
    network = grown().network
    rows = network(some_images()).tolist()
    plain = sum(
        negative_log_probability([one / 5 for one in row], label) / 4
        for row, label in zip(rows, LABELS.tolist(), strict=True)
    )
    assert refit_loss(network, some_images(), LABELS).loss.item() == pytest.approx(plain)


def test_a_wider_classifier_answers_the_same_whatever_the_new_features_are() -> None:
    narrow = GrowingLinear(3)
    narrow.grow(2)
    narrow.grow(2)
    old, new = torch.randn(4, 3), torch.randn(4, 5)
    wide = widened(narrow, width=8)
    torch.testing.assert_close(wide(torch.cat([old, new], dim=1)), narrow(old))


def test_a_new_backbone_begins_as_the_last_one() -> None:
    der = grown(tasks=1)
    with torch.no_grad():
        for one in der.network.parameters():
            one.add_(0.01)
    der.expand(("new",))
    first, second = der.network.experts
    assert equal(state_of(first), state_of(second))
    assert next(first.parameters()) is not next(second.parameters())


def test_features_of_old_backbones_stay_bit_equal() -> None:
    der = Der(PRESET, DerOptions())
    School().teach(der, 0)
    before, features = state_of(der.network.experts[0]), der.features(some_images())
    School().teach(der, 1)
    both = der.features(some_images())
    assert equal(state_of(der.network.experts[0]), before)
    assert torch.equal(both[:, : features.shape[1]], features)
    assert not equal(state_of(der.network.experts[1]), before)


@pytest.mark.long
def test_the_refit_changes_the_classifier_and_nothing_else() -> None:
    refitted, kept = Der(PRESET, DerOptions()), Der(PRESET, DerOptions(refit="none"))
    kept.load_state_dict(refitted.state_dict())
    for task in range(2):
        School().teach(refitted, task)
        School().teach(kept, task)
    assert equal(state_of(refitted.network.experts), state_of(kept.network.experts))
    for one, other in zip(refitted.network.heads, kept.network.heads, strict=True):
        assert not equal(state_of(one), state_of(other))


def test_the_refit_begins_at_zero() -> None:
    """A refit without a step leaves no trace of the classifier that was learnt."""
    der = Der(replace(PRESET, tuning_epochs=0), DerOptions())
    for task in range(2):
        School().teach(der, task)
    assert not any(one.any() for one in der.network.heads.parameters())


def test_three_tasks_are_learnt(tmp_path: Path) -> None:
    whole = run_of("der", tmp_path / "whole")
    whole.go()
    assert whole.lines[-1].accuracy > 0.34
    assert [line.passes for line in whole.lines] == [1, 2, 3]
    assert whole.lines[2].flop == pytest.approx(3 * whole.lines[0].flop, rel=0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    assert_a_killed_run_goes_on("der", tmp_path, phases=("learning", "balanced refit"))
