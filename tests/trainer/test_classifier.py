from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.model_store.networks import grown
from trainer.learning.classifier import (
    UNSEEN_L2_PENALTY,
    Problem,
    fit_classifier,
    former_weights,
    solve,
)
from trainer.learning.losses import CLASSIFICATIONS, cross_entropy

Tokens = NDArray[np.float32]


def clouds(
    counts: list[int], *, width: int = 24, spread: float = 1.0, seed: int = 0
) -> tuple[Tokens, NDArray[np.int64]]:
    """Tokens of classes that lie around means of their own."""
    draw = np.random.default_rng(seed)
    means = draw.normal(size=(len(counts), width))
    labels = np.repeat(np.arange(len(counts)), counts)
    tokens = means[labels] + spread * draw.normal(size=(len(labels), width)) + 5
    return tokens.astype(np.float32), labels.astype(np.int64)


def problem(counts: list[int], **others: float) -> Problem:
    tokens, labels = clouds(counts, **others)  # type: ignore[arg-type]
    return Problem(
        tokens_NW=torch.from_numpy(tokens).double(),
        labels_N=torch.from_numpy(labels),
        count=len(counts),
        loss=cross_entropy,
    )


def logits_of(heads: nn.ModuleList, tokens: Tokens) -> Tensor:
    with torch.no_grad():
        return torch.cat([head(torch.from_numpy(tokens)) for head in heads], dim=-1)


@pytest.mark.parametrize("loss", CLASSIFICATIONS)
def test_the_solution_is_where_nothing_gets_better(loss: str) -> None:
    """By the gradient of the objective, written out again; every class weighs the same."""
    one = problem([10, 40, 25])
    asked = Problem(
        tokens_NW=one.tokens_NW, labels_N=one.labels_N, count=3, loss=CLASSIFICATIONS[loss]
    )
    weight, bias = solve(asked, l2_penalty=0.1)
    weight.requires_grad_(True)
    bias.requires_grad_(True)
    logits = one.tokens_NW @ weight.T + bias
    by_class = [
        CLASSIFICATIONS[loss](logits[one.labels_N == place], one.labels_N[one.labels_N == place])
        for place in range(3)
    ]
    (sum(by_class) / 3 + 0.05 * weight.square().sum()).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.abs().max() < 1e-4
    assert bias.grad.abs().max() < 1e-4
    assert weight.abs().max() > 0.01


def test_a_larger_l2_penalty_makes_smaller_weights() -> None:
    sizes = [solve(problem([20, 20]), l2_penalty=one)[0].norm() for one in (0.01, 0.1, 1.0)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_fitted_classifier_tells_classes_apart_that_it_has_not_seen() -> None:
    network = grown([2, 1])  # a token of 24 channels, classes 0 and 1, then 2 and 3
    tokens, labels = clouds([60] * 4, seed=3)
    seen, unseen = np.arange(len(labels)) % 2 == 0, np.arange(len(labels)) % 2 == 1
    fit_classifier(network, tokens[seen], labels[seen], answered=range(4), loss=cross_entropy)
    right = logits_of(network.heads, tokens[unseen]).argmax(dim=1).numpy() == labels[unseen]
    assert right.mean() > 0.9


def test_noisier_tokens_get_a_larger_l2_penalty() -> None:
    penalties = []
    for spread in (0.3, 6.0):
        tokens, labels = clouds([40] * 4, spread=spread)
        fitted = fit_classifier(
            grown([2, 1]), tokens, labels, answered=range(4), loss=cross_entropy
        )
        penalties.append(fitted.l2_penalty)
    assert penalties[0] < penalties[1]


def test_probabilities_of_unseen_images_mean_what_they_say() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([200] * 4, spread=2.5, seed=5)
    half = np.arange(len(labels)) % 2 == 0
    fit_classifier(network, tokens[half], labels[half], answered=range(4), loss=cross_entropy)
    logits = logits_of(network.heads, tokens[~half])
    confidence, guess = logits.softmax(dim=1).max(dim=1)
    right = (guess.numpy() == labels[~half]).mean()
    assert confidence.mean().item() == pytest.approx(right, abs=0.06)


def test_logits_that_are_not_answered_stay_as_they_are() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([30, 30, 30])
    labels = np.array([0, 2, 3])[labels]  # class 1 is retired, and has no images
    before = logits_of(network.heads, tokens)
    fit_classifier(network, tokens, labels, answered=[0, 2, 3], loss=cross_entropy)
    after = logits_of(network.heads, tokens)
    assert torch.equal(after[:, 1], before[:, 1])
    assert (
        after[:, [0, 2, 3]].argmax(dim=1).numpy() == np.array([0, 2, 3]).searchsorted(labels)
    ).mean() > 0.9


def test_one_image_a_class_is_enough() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([1] * 4)
    fitted = fit_classifier(network, tokens, labels, answered=range(4), loss=cross_entropy)
    assert (fitted.l2_penalty, fitted.temperature) == (UNSEEN_L2_PENALTY, 1.0)
    assert (logits_of(network.heads, tokens).argmax(dim=1).numpy() == labels).all()


def test_a_class_of_one_image_among_larger_ones_is_learnt_too() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([30, 30, 30, 1], spread=0.5)
    fit_classifier(network, tokens, labels, answered=range(4), loss=cross_entropy)
    assert logits_of(network.heads, tokens[-1:]).argmax().item() == 3


def test_a_single_class_gives_a_classifier() -> None:
    network = grown([2])
    tokens, labels = clouds([10], width=16)
    fit_classifier(network, tokens, labels, answered=[0], loss=cross_entropy)
    assert logits_of(network.heads, tokens).isfinite().all()


def test_strength_is_chosen_on_the_oldest_slice_alone() -> None:
    """A younger expert has seen these very images: that it knows them says nothing."""
    tokens, labels = clouds([30] * 4, spread=4.0)
    knowing = tokens.copy()
    knowing[:, 16:] = np.eye(4, dtype=np.float32)[labels].repeat(2, axis=1) * 50
    plain, boasted = (
        fit_classifier(grown([2, 1]), one, labels, answered=range(4), loss=cross_entropy)
        for one in (tokens, knowing)
    )
    assert plain == boasted


def test_a_class_is_drawn_to_the_weights_it_had() -> None:
    one = problem([20, 20])
    towards = torch.randn(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    free, _ = solve(one, l2_penalty=1e3)
    drawn, _ = solve(one, l2_penalty=1e3, towards_CW=towards)
    assert free.abs().max() < 0.1
    assert (drawn - towards).abs().max() < 0.1


def test_former_weights_count_as_far_as_they_are_trusted_and_new_classes_begin_at_zero() -> None:
    heads = grown([2]).heads  # two classes on 16 channels
    former = former_weights(heads, width=24, trust_C=[0.5, 1.0, 0.7])
    weight = heads[0].get_parameter("weight").detach()
    assert torch.equal(former[0, :16], 0.5 * weight[0])
    assert torch.equal(former[1, :16], weight[1])
    assert not former[:, 16:].any()
    assert not former[2].any()


def test_few_exemplars_do_not_undo_what_many_images_taught() -> None:
    tokens, labels = clouds([100] * 4, spread=2.5, seed=7)
    first, second = np.arange(len(labels)) % 100 < 50, np.arange(len(labels)) % 100 >= 50
    network = grown([2, 1])
    fit_classifier(network, tokens[first], labels[first], answered=range(4), loss=cross_entropy)
    former = former_weights(network.heads, width=24, trust_C=[0.96] * 4)
    few = np.arange(len(labels)) % 100 < 2
    accuracies = []
    for known in (None, former):
        again = grown([2, 1])
        fit_classifier(
            again, tokens[few], labels[few], answered=range(4), loss=cross_entropy, former_CW=known
        )
        guesses = logits_of(again.heads, tokens[second]).argmax(dim=1).numpy()
        accuracies.append((guesses == labels[second]).mean())
    assert accuracies[1] > accuracies[0] + 0.03
