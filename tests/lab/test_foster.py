"""Test FOSTER: its weights and losses by hand, parts that stay as they are, and killed runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lab.methods.foster import (
    Boosting,
    BoostingLoss,
    CompressionLoss,
    Foster,
    FosterOptions,
    balanced_distillation,
    boost,
    class_weights,
    compress,
)
from tests.lab.striped import (
    PRESET,
    SHORT,
    School,
    assert_a_killed_run_goes_on,
    equal,
    run_of,
    some_images,
    state_of,
)

TEACHER = [[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [1.0, 1.0, 1.0], [-0.5, 0.2, 0.1]]
STUDENT = [[0.3, 1.0, -0.5], [1.0, 2.0, 0.0], [0.1, -0.4, 0.9], [0.0, 0.0, 2.0]]
WEIGHTS = [1.6, 0.9, 0.5]


def softmax(row: list[float]) -> list[float]:
    return [math.exp(one) / sum(map(math.exp, row)) for one in row]


def test_classes_are_weighted_by_the_inverse_of_their_effective_number() -> None:
    counts = [8, 8, 200]
    inverse = [(1 - 0.96) / (1 - 0.96**count) for count in counts]
    plain = [one * 3 / sum(inverse) for one in inverse]
    found = class_weights(torch.tensor(counts), beta=0.96)
    assert found.tolist() == pytest.approx(plain)
    assert found[0] > 1 > found[2]


def test_equal_classes_have_the_weight_one() -> None:
    assert class_weights(torch.tensor([20, 20]), beta=0.97).tolist() == pytest.approx([1.0, 1.0])


def test_balanced_distillation_weighs_the_probabilities_of_the_teacher() -> None:
    plain = 0.0
    for teacher, student in zip(TEACHER, STUDENT, strict=True):
        soft = softmax([one / 2 for one in teacher])
        asked = [share * weight for share, weight in zip(soft, WEIGHTS, strict=True)]
        answer = softmax([one / 2 for one in student])
        plain -= sum(
            share / sum(asked) * math.log(one) for share, one in zip(asked, answer, strict=True)
        )
    found = balanced_distillation(*map(torch.tensor, (STUDENT, TEACHER, WEIGHTS)))
    assert found.item() == pytest.approx(2**2 * plain / 4)


def both_of(foster: Foster) -> Boosting:
    torch.manual_seed(1)
    return Boosting(foster.network, classes=4)


def grown() -> Foster:
    torch.manual_seed(0)
    foster = Foster(PRESET, FosterOptions())
    foster.expand(("a", "b"))
    foster.expand(("c", "d"))
    return foster.eval()


def test_boosting_begins_with_the_old_answers() -> None:
    foster = grown()
    both = both_of(foster)
    features = [both.before(some_images()), both.second(some_images())]
    joint = both.joint(torch.cat(features, dim=1))
    torch.testing.assert_close(joint[:, :2], foster.scores(some_images())[:, :2])


def test_the_loss_of_boosting_by_hand() -> None:
    both, labels, weights = both_of(grown()), [0, 3, 2, 1], [1.5, 1.5, 0.5, 0.5]
    for one in both.joint.parameters():
        torch.nn.init.normal_(one)
    step = BoostingLoss(old=2, weights_C=torch.tensor(weights))(
        both, some_images(), torch.tensor(labels)
    )
    features = [both.before(some_images()), both.second(some_images())]
    joint = both.joint(torch.cat(features, dim=1)).tolist()
    alone, taught = both.auxiliary(features[1]).tolist(), both.network.heads(features[0]).tolist()
    plain = 0.0
    for row, other, before, label in zip(joint, alone, taught, labels, strict=True):
        aligned = [one / weight for one, weight in zip(row, weights, strict=True)]
        plain -= math.log(softmax(aligned)[label]) + math.log(softmax(other)[label])
        asked, answer = (softmax([one / 2 for one in part[:2]]) for part in (before, row))
        plain += sum(one * math.log(one / given) for one, given in zip(asked, answer, strict=True))
    assert step.loss.item() == pytest.approx(plain / 4, rel=1e-4)


def test_the_loss_of_compression_follows_both_backbones() -> None:
    both = both_of(grown())
    for one in both.joint.parameters():
        torch.nn.init.normal_(one)
    weights = torch.tensor([1.5, 1.5, 0.5, 0.5])
    step = CompressionLoss(weights_C=weights)(both, some_images(), torch.tensor([0, 1, 2, 3]))
    features = [both.before(some_images()), both.second(some_images())]
    taught = both.joint(torch.cat(features, dim=1))
    expected = balanced_distillation(both.network(some_images()), taught, weights)
    torch.testing.assert_close(step.loss, expected)


@pytest.mark.long
def test_boosting_leaves_the_network_and_compression_leaves_its_teacher_bit_equal() -> None:
    foster = Foster(PRESET, FosterOptions())
    School().teach(foster, 0)
    lesson = School().lesson(1)
    foster.expand(lesson.new)
    both = both_of(foster)
    weights = class_weights(torch.tensor([4, 4, 12, 12]), beta=0.96)
    network, before, second = map(state_of, (both.network, both.before, both.second))
    boost(both, lesson, weights_C=weights)
    assert equal(state_of(both.network), network)
    assert equal(state_of(both.before), before)
    assert not equal(state_of(both.second), second)
    teacher = list(map(state_of, (both.before, both.second, both.joint)))
    compress(both, lesson, weights_C=weights)
    assert all(map(equal, map(state_of, (both.before, both.second, both.joint)), teacher))
    assert not equal(state_of(both.network), network)


def test_three_tasks_are_learnt(tmp_path: Path) -> None:
    whole = run_of("foster", tmp_path / "whole")
    whole.go()
    assert whole.lines[-1].accuracy > 0.34
    assert whole.lines[-1].parameters < 1.1 * whole.lines[0].parameters


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    assert_a_killed_run_goes_on("foster", tmp_path, phases=("boosting", "compression"))


@pytest.mark.slow
def test_the_first_task_is_shared_with_der(tmp_path: Path) -> None:
    der, foster = (run_of(one, tmp_path, preset=SHORT) for one in ("der", "foster"))
    assert der.base_path == foster.base_path
    der.go()
    foster.go()
    assert foster.lines[0].shared_base
    assert foster.lines[0].accuracy == der.lines[0].accuracy
