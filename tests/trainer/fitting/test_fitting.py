"""Fits agree with their closed forms in numpy, and choices with what is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import empirical_covariance, shrunk_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from trainer.fitting.choice import FOLDS, Choice, Method, choose, fit, leave_out, spread, unit_of
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Discriminant, Linear, Problem, Rotation, variance_of
from trainer.learning.losses import cross_entropy


def problem(
    counts: list[int], *, width: int, spread: float = 1.0, correlated: bool = False, seed: int = 0
) -> Problem:
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    noise = draw.normal(size=(len(labels), width))
    if correlated:
        noise = noise @ np.diag(np.geomspace(4, 0.05, width))
    tokens = draw.normal(size=(len(counts), width))[labels] + spread * noise + 2
    return Problem(
        tokens_NW=torch.from_numpy(tokens),
        labels_N=torch.from_numpy(labels),
        count=len(counts),
        loss=cross_entropy,
    )


def closed_form(asked: Problem, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """LDA as a book has it: log-odds of normal distributions of one covariance."""
    tokens, labels = asked.tokens_NW.numpy(), asked.labels_N.numpy()
    means = np.stack([tokens[labels == place].mean(axis=0) for place in range(asked.count)])
    around = tokens - means[labels]
    covariance = around.T @ around / (len(labels) - asked.count)
    level = np.trace(covariance) / tokens.shape[1]
    shrunk = (1 - shrinkage) * covariance + shrinkage * level * np.eye(tokens.shape[1])
    weight = np.linalg.solve(shrunk, means.T).T
    return weight, -0.5 * (means * weight).sum(axis=1)


def exactly(asked: Problem) -> Linear:
    return solve(asked, l2_penalty=0.1, tolerance=1e-10, iterations=2000)


def shares(tokens: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    logits = tokens @ weight.T + bias
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(found / found.sum(axis=1, keepdims=True))


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(2, 12), min_size=2, max_size=4),
    width=st.integers(1, 20),
    shrinkage=st.sampled_from([0.02, 0.3, 0.95]),
    seed=st.integers(0, 99),
)
def test_lda_gives_the_probabilities_of_its_closed_form(
    counts: list[int], width: int, shrinkage: float, seed: int
) -> None:
    asked = problem(counts, width=width, seed=seed)
    weight, bias = Discriminant(asked).solve(shrinkage=shrinkage)
    expected = shares(asked.tokens_NW.numpy(), *closed_form(asked, shrinkage))
    found = shares(asked.tokens_NW.numpy(), weight.numpy(), bias.numpy())
    assert np.allclose(found, expected, atol=1e-8)
    assert weight.sum(dim=0).abs().max() < 1e-8 * max(1.0, float(weight.abs().max()))


@settings(deadline=None, max_examples=20)
@given(
    counts=st.lists(st.integers(3, 12), min_size=3, max_size=4),
    width=st.integers(2, 12),
    shrinkage=st.sampled_from([0.02, 0.3, 0.95]),
    seed=st.integers(0, 99),
)
def test_lda_agrees_with_the_one_of_scikit_learn(
    counts: list[int], width: int, shrinkage: float, seed: int
) -> None:
    asked = problem(counts, width=width, seed=seed)
    tokens, labels = asked.tokens_NW.numpy(), asked.labels_N.numpy()
    weight, bias = Discriminant(asked).solve(shrinkage=shrinkage)
    estimated = LinearDiscriminantAnalysis(
        solver="lsqr",
        # A function of the images of one class. The classes weigh as their numbers of images.
        covariance_estimator=Shrunk(shrinkage),
    ).fit(tokens, labels)
    # It divides by all images where a covariance is estimated without bias, and adds log priors.
    scale = len(labels) / (len(labels) - len(counts))
    others = estimated.decision_function(tokens) - np.log(estimated.priors_)
    found = scale * (tokens @ weight.numpy().T + bias.numpy())
    assert np.allclose(
        found - found.mean(axis=1, keepdims=True),
        others - others.mean(axis=1, keepdims=True),
        atol=1e-6 * max(1.0, float(np.abs(others).max())),
    )


class Shrunk:
    """The covariance of one class, shrunk as scikit-learn shrinks it."""

    def __init__(self, shrinkage: float) -> None:
        self.shrinkage = shrinkage
        self.covariance_ = np.zeros((0, 0))

    def fit(self, tokens: np.ndarray) -> Shrunk:
        self.covariance_ = shrunk_covariance(empirical_covariance(tokens), self.shrinkage)
        return self


@settings(deadline=None, max_examples=20)
@given(counts=st.lists(st.integers(1, 6), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_a_rotation_changes_no_fit(counts: list[int], seed: int) -> None:
    """Fewer tokens than channels: both fits are made in as many channels as there are tokens."""
    asked = problem(counts, width=30, seed=seed)
    rotation = Rotation.of(asked.tokens_NW)
    turned = rotation.turned(asked)
    assert turned.tokens_NW.shape[1] == len(asked.labels_N) < 30
    assert variance_of(turned) == pytest.approx(variance_of(asked))
    for whole, small in (
        (
            Discriminant(asked).solve(shrinkage=0.3),
            rotation.back(Discriminant(turned).solve(shrinkage=0.3)),
        ),
        (exactly(asked), rotation.back(exactly(turned))),
    ):
        for one, other in zip(whole, small, strict=True):
            assert torch.allclose(one, other, atol=1e-3 * max(1.0, float(one.abs().max())))


def test_images_that_are_all_alike_have_a_discriminant() -> None:
    asked = problem([3, 3], width=4, spread=0.0)
    weight, bias = Discriminant(asked).solve(shrinkage=0.1)
    answers = (asked.tokens_NW @ weight.T + bias).argmax(dim=1)
    assert answers.equal(asked.labels_N)


def test_lda_is_chosen_where_channels_vary_together() -> None:
    """The noise has a few large directions, which a covariance knows and a penalty does not."""
    asked = problem([30] * 5, width=40, spread=8.0, correlated=True)
    found = choose(asked)
    assert found.choice.method == "lda"
    assert found.likelihood < choose(asked, methods=("logistic",)).likelihood


def test_a_flat_beginning_does_not_end_the_search_for_a_shrinkage() -> None:
    """Near the identity the large directions drown all classes, and left-out images are guessed."""
    asked = problem([30] * 5, width=40, spread=12.0, correlated=True)
    assert choose(asked, methods=("lda",)).choice.strength < 0.1


def test_a_choice_tells_the_share_of_left_out_images_that_are_right() -> None:
    easy, hard = (choose(problem([20] * 4, width=8, spread=spread)) for spread in (0.1, 5.0))
    assert easy.choice.accuracy == 1.0
    assert hard.choice.accuracy is not None
    assert hard.choice.accuracy < 0.7
    assert choose(problem([1, 1], width=3)).choice.accuracy is None
    assert len(hard.losses_M) == 80


def test_images_that_belong_together_are_left_out_together() -> None:
    labels = np.repeat(np.arange(3), 20)
    groups = torch.from_numpy(np.arange(60) // 4)
    asked = replace(problem([20] * 3, width=4), labels_N=torch.from_numpy(labels))
    folds = spread(asked, groups)
    for group in range(15):
        assert len(set(folds[groups == group].tolist())) == 1
    for place in range(3):
        assert sorted(folds[asked.labels_N == place].tolist()) == sorted([*range(FOLDS)] * 4)


def test_a_class_of_one_group_is_never_left_out() -> None:
    asked = problem([6, 6], width=4)
    groups = torch.tensor([7] * 6 + [*range(6)])
    folds = spread(asked, groups)
    assert set(folds[:6].tolist()) == {-1}
    assert -1 not in folds[6:].tolist()


def test_twins_among_the_left_out_images_would_flatter() -> None:
    """Every image is there four times: left out alone, its copies give its class away."""
    one = problem([6] * 5, width=60, spread=4.0)
    copies = Problem(
        tokens_NW=one.tokens_NW.repeat_interleave(4, dim=0),
        labels_N=one.labels_N.repeat_interleave(4),
        count=5,
        loss=cross_entropy,
    )
    groups = torch.arange(30).repeat_interleave(4)
    flattered, honest = choose(copies).choice, choose(copies, groups_N=groups).choice
    assert flattered.accuracy == 1.0
    assert honest.accuracy is not None
    assert honest.accuracy < 0.8


def test_the_unit_of_logits_is_the_scale_that_they_are_multiplied_by() -> None:
    asked = problem([40] * 3, width=6, spread=2.0)
    judged = choose(asked, methods=("logistic",)).left_out
    assert judged is not None
    units = [unit_of(replace(judged, logits_NC=judged.logits_NC * scale)) for scale in (1, 100)]
    assert units[1] / units[0] == pytest.approx(100, rel=0.3)


def test_a_fit_is_that_of_its_choice() -> None:
    asked = problem([30] * 5, width=40, spread=1.5, correlated=True)
    chosen = choose(asked, methods=("lda",)).choice
    weight, bias = fit(asked, chosen, variance=variance_of(asked))
    expected = Discriminant(asked).solve(shrinkage=chosen.strength)
    assert torch.allclose(weight, expected[0])
    assert torch.allclose(bias, expected[1])


@pytest.mark.parametrize("method", ["logistic", "lda"])
def test_each_image_is_judged_by_a_fit_without_its_group(method: Method) -> None:
    asked = problem([12, 9, 10], width=6)
    choice = Choice(method=method, strength=0.1, temperature=1.0)
    groups_N = torch.arange(31) // 2
    judged_N = torch.arange(31) < 21
    found = leave_out(asked, choice, judged_N=judged_N, groups_N=groups_N)
    assert found is not None
    folds_N = torch.where(judged_N, spread(asked, groups_N), -1)
    assert found.labels_N.tolist() == [0] * 12 + [1] * 9
    for row in range(21):
        kept = asked.take(folds_N != folds_N[row])
        weight_CW, bias_C = fit(kept, choice, variance=variance_of(asked))
        expected_C = asked.tokens_NW[row] @ weight_CW.T + bias_C
        assert torch.allclose(
            torch.from_numpy(found.logits_NC[row]).double(), expected_C, atol=0.01
        )


def test_where_no_image_can_be_left_out_none_is_judged() -> None:
    asked = problem([1, 1], width=3)
    none = leave_out(
        asked,
        Choice(strength=0.1, temperature=1.0),
        judged_N=torch.ones(2, dtype=torch.bool),
        groups_N=None,
    )
    assert none is None
