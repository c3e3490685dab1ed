from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model_store.errors import WrongUsage
from model_store.inference.forward import Lineage
from tests.model_store.networks import grown, images
from trainer.learning.losses import (
    LossWeights,
    Objective,
    Teacher,
    binary,
    classification_named,
    cross_entropy,
    distillation,
    expertise,
)

LOGITS = [[2.0, -1.0, 0.5], [0.0, 3.0, -2.0]]
LABELS = [2, 1]


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value) for value in row]
    return [weight / sum(weights) for weight in weights]


def test_cross_entropy_is_the_mean_negative_log_probability() -> None:
    rows = zip(LOGITS, LABELS, strict=True)
    plain = sum(-math.log(softmax(row)[label]) for row, label in rows) / 2
    assert cross_entropy(torch.tensor(LOGITS), torch.tensor(LABELS)).item() == pytest.approx(plain)


def test_the_binary_loss_asks_each_class_for_itself() -> None:
    plain = 0.0
    for row, label in zip(LOGITS, LABELS, strict=True):
        for index, value in enumerate(row):
            chance = 1 / (1 + math.exp(-value))
            plain -= math.log(chance if index == label else 1 - chance)
    assert binary(torch.tensor(LOGITS), torch.tensor(LABELS)).item() == pytest.approx(plain / 2)


def test_expertise_takes_all_old_classes_for_one() -> None:
    # Classes 0 and 1 are old: output 0. Class 2 is the first new one: output 1.
    auxiliary = torch.tensor([[1.0, 2.0, 3.0]] * 4)
    chances = softmax([1.0, 2.0, 3.0])
    plain = -sum(math.log(chances[output]) for output in (0, 0, 1, 2)) / 4
    loss = expertise(auxiliary, torch.tensor([0, 1, 2, 3]), old_classes=2)
    assert loss.item() == pytest.approx(plain)


def test_distillation_is_the_divergence_from_the_teacher() -> None:
    student, teacher = LOGITS, [[1.0, 1.0, 1.0], [0.0, 2.0, -1.0]]
    plain = 0.0
    for ours, theirs in zip(student, teacher, strict=True):
        for p, q in zip(softmax(theirs), softmax(ours), strict=True):
            plain += p * math.log(p / q)
    loss = distillation(torch.tensor(student), torch.tensor(teacher))
    assert loss.item() == pytest.approx(plain / 2)


def test_the_objective_is_the_weighted_sum_and_its_teacher_the_parent() -> None:
    parent = grown([2])
    network = grown([2, 1])  # the same first expert: the same seed made it
    teacher = Teacher(heads=parent.heads, classes=2)
    auxiliary = network.auxiliary_head()
    labels, pixels = torch.tensor([0, 3, 2]), images()
    objective = Objective(classification=cross_entropy, teacher=teacher, auxiliary=auxiliary)
    step = objective(network, pixels, labels)
    logits, token = network(pixels), torch.cat(network.token_slices(pixels), dim=-1)
    plain = (
        cross_entropy(logits, labels)
        + 0.1 * expertise(auxiliary(token), labels, old_classes=2)
        + distillation(logits[:, :2], parent(pixels))
    )
    torch.testing.assert_close(step.loss, plain)
    assert step.right.item() == (logits.argmax(dim=-1) == labels).sum().item()


def test_the_shares_of_the_classes_are_added_in_the_loss_alone() -> None:
    network, parent = grown([2, 1]), grown([2])
    auxiliary, counts = network.auxiliary_head(), torch.tensor([5.0, 20.0, 100.0, 50.0])
    labels, pixels = torch.tensor([0, 3, 2]), images()
    teacher = Teacher(heads=parent.heads, classes=2)
    plain = Objective(classification=cross_entropy, teacher=teacher, auxiliary=auxiliary)
    step = replace(plain, log_counts_C=counts.log())(network, pixels, labels)
    logits, token = network(pixels), torch.cat(network.token_slices(pixels), dim=-1)
    asked = auxiliary(token) + torch.tensor([25.0, 100.0, 50.0]).log()
    loss = (
        cross_entropy(logits + counts.log(), labels)
        + 0.1 * expertise(asked, labels, old_classes=2)
        + distillation(logits[:, :2], parent(pixels))
    )
    torch.testing.assert_close(step.loss, loss)
    assert step.right.item() == (logits.argmax(dim=-1) == labels).sum().item()


def test_the_papers_weights() -> None:
    assert LossWeights() == LossWeights(classification=1.0, expertise=0.1, distillation=1.0)


def test_no_gradient_reaches_the_teacher_or_an_old_expert() -> None:
    network = grown([2, 1])
    old_heads = grown([2]).heads
    teacher = Teacher(heads=old_heads, classes=2)
    step = Objective(classification=cross_entropy, teacher=teacher)(
        network, images(), torch.tensor([0, 3, 2])
    )
    step.loss.backward()
    frozen = [*network.experts[0].parameters(), *old_heads.parameters()]
    assert all(parameter.grad is None for parameter in frozen)
    assert all(parameter.grad is not None for parameter in network.learnable())


@pytest.mark.parametrize("folded", [1, 2])
def test_experts_that_do_not_learn_may_be_given_in_folded_form(folded: int) -> None:
    network = grown([2, 1])
    teacher = Teacher(heads=grown([2]).heads, classes=2)
    labels, pixels = torch.tensor([0, 3, 2]), images()
    plain = Objective(classification=cross_entropy, teacher=teacher if folded == 1 else None)
    frozen = replace(plain, frozen=Lineage.of(network, experts=folded))
    step, expected = (objective(network, pixels, labels) for objective in (frozen, plain))
    torch.testing.assert_close(step.loss, expected.loss)
    assert step.right.item() == expected.right.item()
    learning = network.learnable() if folded == 1 else list(network.heads.parameters())
    found, known = (torch.autograd.grad(one.loss, learning) for one in (step, expected))
    torch.testing.assert_close(found, known)


def test_an_unknown_loss_is_wrong_usage() -> None:
    with pytest.raises(WrongUsage, match="not one of cross-entropy, binary"):
        classification_named("hinge")
