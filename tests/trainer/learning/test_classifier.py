from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.network.network import Network
from tests.model_store.networks import grown
from trainer.fitting.choice import UNSEEN_L2_PENALTY, Choice, choose
from trainer.fitting.logistic import solve
from trainer.fitting.problem import SMALL, Problem
from trainer.learning.classifier import Given, fit_classifier
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


def fit(
    network: Network,
    tokens: Tokens,
    labels: NDArray[np.int64],
    *,
    former: nn.ModuleList | None = None,
    **others: Any,
) -> Choice:
    given = Given(tokens_NV=tokens, labels_N=labels, loss=cross_entropy, **others)
    return fit_classifier(network, given, former=former).choice


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
    fit(network, tokens[seen], labels[seen], answered=range(4))
    right = logits_of(network.heads, tokens[unseen]).argmax(dim=1).numpy() == labels[unseen]
    assert right.mean() > 0.9


def test_noisier_tokens_get_a_larger_l2_penalty() -> None:
    chosen = [
        choose(problem([40] * 4, spread=spread), methods=("logistic",)).choice
        for spread in (0.3, 6.0)
    ]
    assert chosen[0].strength < chosen[1].strength


def test_probabilities_of_unseen_images_mean_what_they_say() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([800] * 4, spread=2.5, seed=5)
    half = np.arange(len(labels)) % 2 == 0
    fit(network, tokens[half], labels[half], answered=range(4))
    logits = logits_of(network.heads, tokens[~half])
    confidence, guess = logits.softmax(dim=1).max(dim=1)
    right = (guess.numpy() == labels[~half]).mean()
    assert confidence.mean().item() == pytest.approx(right, abs=0.06)


def test_logits_that_are_not_answered_stay_as_they_are() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([30, 30, 30])
    labels = np.array([0, 2, 3])[labels]  # class 1 is retired, and has no images
    before = logits_of(network.heads, tokens)
    fit(network, tokens, labels, answered=[0, 2, 3])
    after = logits_of(network.heads, tokens)
    assert torch.equal(after[:, 1], before[:, 1])
    assert (
        after[:, [0, 2, 3]].argmax(dim=1).numpy() == np.array([0, 2, 3]).searchsorted(labels)
    ).mean() > 0.9


def test_one_image_a_class_is_enough() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([1] * 4)
    fitted = fit(network, tokens, labels, answered=range(4))
    assert (fitted.strength, fitted.temperature) == (UNSEEN_L2_PENALTY, 1.0)
    assert (logits_of(network.heads, tokens).argmax(dim=1).numpy() == labels).all()


def test_a_class_of_one_image_among_larger_ones_is_learnt_too() -> None:
    network = grown([2, 1])
    tokens, labels = clouds([30, 30, 30, 1], spread=0.5)
    fit(network, tokens, labels, answered=range(4))
    assert logits_of(network.heads, tokens[-1:]).argmax().item() == 3


def test_a_single_class_gives_a_classifier() -> None:
    network = grown([2])
    tokens, labels = clouds([10], width=16)
    fit(network, tokens, labels, answered=[0])
    assert logits_of(network.heads, tokens).isfinite().all()


def test_strength_is_chosen_on_the_oldest_slice_alone() -> None:
    """A younger expert has seen these very images: that it knows them says nothing."""
    tokens, labels = clouds([30] * 4, spread=4.0)
    knowing = tokens.copy()
    knowing[:, 16:] = np.eye(4, dtype=np.float32)[labels].repeat(2, axis=1) * 50
    plain, boasted = (
        fit(grown([2, 1]), one, labels, answered=range(4)) for one in (tokens, knowing)
    )
    assert plain == boasted


def test_former_rows_follow_the_others_where_a_class_has_no_tokens() -> None:
    """A vector that all former rows have in common does not matter."""
    tokens, labels = clouds([60] * 4, seed=3)
    seen, unseen = np.arange(len(labels)) % 2 == 0, np.arange(len(labels)) % 2 == 1
    network = grown([2, 1])
    fit(network, tokens[seen], labels[seen], answered=range(4))
    before = logits_of(network.heads, tokens[unseen])
    with torch.no_grad():
        for head in network.heads:
            head.get_parameter("weight").add_(3.0)
            head.get_parameter("bias").sub_(5.0)
    rest = seen & (labels != 1)
    fit(
        network,
        tokens[rest],
        labels[rest],
        answered=range(4),
        former=copy.deepcopy(network.heads),
    )
    after = logits_of(network.heads, tokens[unseen])
    assert (after.argmax(dim=1) == before.argmax(dim=1)).float().mean() > 0.95


def test_channels_that_are_not_given_get_no_weight() -> None:
    network = grown([2, 1])  # slices of 16 and 8 channels
    tokens, labels = clouds([40] * 4, seed=3)
    fit(network, tokens[:, :16], labels, answered=range(4))
    assert not any(head.get_parameter("weight")[:, 16:].any() for head in network.heads)
    assert (logits_of(network.heads, tokens).argmax(dim=1).numpy() == labels).mean() > 0.9


@pytest.mark.long
def test_only_images_that_are_judged_choose_the_penalty() -> None:
    """The judged classes lie far apart, and the others are noise."""
    one = problem([40] * 4, spread=0.3)
    noise = one.labels_N > 1
    one.tokens_NW[noise] = torch.from_numpy(
        np.random.default_rng(1).normal(size=one.tokens_NW[noise].shape)
    )
    chosen = [
        choose(one, judged_N=judged, methods=("logistic",)).choice for judged in (None, ~noise)
    ]
    assert chosen[1].strength < chosen[0].strength


@pytest.mark.long
def test_a_fit_does_not_load_the_compiler_of_torch() -> None:
    code = (
        "import sys, torch\n"
        "from trainer.fitting.logistic import solve\n"
        "from trainer.fitting.problem import Problem\n"
        "from trainer.learning.losses import cross_entropy\n"
        "tokens, labels = torch.eye(4).double(), torch.tensor([0, 0, 1, 1])\n"
        "problem = Problem(tokens_NW=tokens, labels_N=labels, count=2, loss=cross_entropy)\n"
        "solve(problem, l2_penalty=0.1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_temperature_of_a_sample_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit to all tokens is surer than one to a sample, and needs another temperature."""
    asked = problem([40, 40, 40], spread=2.0)
    assert not choose(asked).choice.by_sample
    monkeypatch.setattr("trainer.fitting.choice.IMAGES_TO_CHOOSE_BY", 60)
    assert choose(asked).choice.by_sample


def test_small_fits_take_one_thread_and_leave_the_others_alone() -> None:
    tokens, labels = clouds([10, 10])
    network = grown([3], noise=0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit(network, tokens, labels, answered=[0, 1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert problem([10, 10]).is_small
    many = torch.zeros(1, 1, dtype=torch.float64).expand(SMALL, 1)
    assert not replace(problem([1]), tokens_NW=many).is_small
