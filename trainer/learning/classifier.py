"""Fit the task heads to final tokens: logistic regression with an L2 penalty.

The problem is convex, so there are no epochs and no learning rate, and the start does not matter.
Cross-validation finds the L2 penalty. Every class weighs the same, whatever its number of images.
A token may stand in for an image that is gone (ADR 51). N tokens, W channels, V of them with
weights, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.network.network import Network
from trainer.evaluation.calibrate import fit_temperature, negative_log_likelihood
from trainer.evaluation.judged import Judged
from trainer.learning.fit import skip_the_compiler
from trainer.learning.losses import Classification
from trainer.ranks.threads import one_thread

L2_PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""The penalties to choose from, for tokens of variance 1; the largest first."""
UNSEEN_L2_PENALTY = 0.03
"""The penalty where no class has two images, and none can be left out to choose by."""
LEAST_GAIN = 0.001
"""The gain in an image's log-likelihood that makes the next smaller penalty worth a try."""
SMALL = 50_000_000
"""Products of a pass (tokens × channels × classes) below which threads wait longer for each other
than they compute."""
FOLDS = 5
IMAGES_TO_CHOOSE_BY = 4000
ITERATIONS = 100
TOLERANCE = 1e-6
"""The largest gradient at which the solver stops."""
TOLERANCE_TO_CHOOSE = 1e-4
ITERATIONS_TO_CHOOSE = 20
"""A quarter of the time of a full fit, and the same choice (ADR 51)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The choices of cross-validation."""

    l2_penalty: float
    temperature: float
    by_sample: bool = False
    """True if a part of the tokens gave the temperature: a fit to all of them is surer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tokens, and the class of each as an index below `count`."""

    tokens_NW: Tensor
    labels_N: Tensor
    count: int
    loss: Classification

    def take(self, rows_N: Tensor) -> Problem:
        return replace(self, tokens_NW=self.tokens_NW[rows_N], labels_N=self.labels_N[rows_N])

    def in_single_precision(self) -> Problem:
        """Halve the time of a fit, whose tolerance must be far from the precision."""
        return replace(self, tokens_NW=self.tokens_NW.float())

    def narrowed(self, width: int) -> Problem:
        """Keep the first channels of the tokens only."""
        return replace(self, tokens_NW=self.tokens_NW[:, :width])

    @property
    def is_small(self) -> bool:
        """Tell whether one thread is faster than several."""
        return self.tokens_NW.numel() * self.count < SMALL

    @property
    def images_C(self) -> Tensor:
        return torch.bincount(self.labels_N, minlength=self.count)


def fit_classifier(
    network: Network,
    tokens_NV: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    *,
    answered: Sequence[int],
    loss: Classification,
    judged_N: NDArray[np.bool_] | None = None,
    former: nn.ModuleList | None = None,
) -> Fitted:
    """Fit all heads to the first V channels of tokens; all other channels get weights of zero.

    Of the `answered` logits, those without tokens keep their `former` rows, which follow those of
    the others. Logits that are not answered stay as they are. Penalty and temperature are chosen on
    the oldest expert's slice: younger experts have learnt from these very images, and would be
    trusted too much. Only tokens that are `judged_N` tell how good a choice is; None: all do.
    """
    fitted_to = [place for place in answered if (labels_N == place).any()]
    places = {place: row for row, place in enumerate(fitted_to)}
    problem = Problem(
        tokens_NW=torch.from_numpy(tokens_NV).double(),
        labels_N=torch.tensor([places[int(label)] for label in labels_N]),
        count=len(places),
        loss=loss,
    )
    oldest = problem.narrowed(network.spec.slice_width(0))
    with one_thread() if problem.is_small else nullcontext():
        fitted = choose(oldest, judged_N=None if judged_N is None else torch.from_numpy(judged_N))
        narrow_CV, bias_C = solve(problem, l2_penalty=fitted.l2_penalty * variance_of(oldest))
    weight_CW = torch.zeros(len(places), network.spec.token_width, dtype=torch.float64)
    # A penalty makes the classifier too unsure: the temperature of cross-validation undoes it.
    weight_CW[:, : narrow_CV.shape[1]] = narrow_CV / fitted.temperature
    linear = weight_CW, bias_C / fitted.temperature
    kept = [place for place in answered if place not in places]
    if former is not None and kept:
        linear = _with_former_rows(linear, former, fitted_to=fitted_to, kept=kept)
    _put(network.heads, [*fitted_to, *kept], *linear)
    return fitted


def _with_former_rows(
    linear: Linear, former: nn.ModuleList, *, fitted_to: Sequence[int], kept: Sequence[int]
) -> Linear:
    """Add the former rows of classes that have no tokens, moved as the others were on average.

    One vector added to all classes changes no probability, so each fit is free to add another.
    """
    weight_CW, bias_C = linear
    before_CW, before_C = _rows_of(former, width=weight_CW.shape[1])
    both = [(row, place) for row, place in enumerate(fitted_to) if place < len(before_C)]
    rows, older = [row for row, _ in both], [place for _, place in both]
    moved_W = (weight_CW[rows] - before_CW[older]).mean(dim=0)
    moved = (bias_C[rows] - before_C[older]).mean()
    return (
        torch.cat([weight_CW, before_CW[list(kept)] + moved_W]),
        torch.cat([bias_C, before_C[list(kept)] + moved]),
    )


def _rows_of(heads: nn.ModuleList, *, width: int) -> Linear:
    """Return the rows of all heads, in the order of the logits, with zeros for new channels."""
    weights, biases = [], []
    for head in heads:
        assert isinstance(head, nn.Linear)
        new = torch.zeros(head.out_features, width - head.in_features)
        weights.append(torch.cat([head.weight.detach().cpu(), new], dim=1))
        biases.append(head.bias.detach().cpu())
    return torch.cat(weights).double(), torch.cat(biases).double()


Linear = tuple[Tensor, Tensor]
"""Weight [C, W] and bias [C]."""


def solve(
    problem: Problem,
    *,
    l2_penalty: float,
    near: Linear | None = None,
    tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Linear:
    """Fit the labels, with an L2 penalty on the weights.

    A solution that is `near` saves time, and changes nothing else.
    """
    mean_W = problem.tokens_NW.mean(dim=0)
    centred_NW = problem.tokens_NW - mean_W  # converges faster; the bias takes up the mean
    images_C = problem.images_C
    share_N = (images_C[problem.labels_N] * (images_C > 0).sum()).to(mean_W.dtype).reciprocal()
    weight_CW = torch.zeros(problem.count, len(mean_W), dtype=mean_W.dtype)
    bias_C = torch.zeros(problem.count, dtype=mean_W.dtype)
    if near is not None:
        weight_CW, bias_C = near[0].clone(), near[1] + near[0] @ mean_W
    weight_CW.requires_grad_(True)
    bias_C.requires_grad_(True)
    skip_the_compiler()
    optimiser = torch.optim.LBFGS(
        [weight_CW, bias_C],
        max_iter=iterations,
        tolerance_grad=tolerance,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        logits_NC = centred_NW @ weight_CW.T + bias_C
        fit = problem.loss(logits_NC, problem.labels_N, weights_B=share_N)
        total = fit + 0.5 * l2_penalty * weight_CW.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    weight, bias = weight_CW.detach(), bias_C.detach()
    return weight, bias - weight @ mean_W


def choose(problem: Problem, *, judged_N: Tensor | None = None) -> Fitted:
    """Choose the penalty under which left-out images are likeliest, each at its temperature.

    Only those that are `judged_N` are left out; None: all are.
    """
    rows_N = _sample(problem)
    sample = problem.take(rows_N).in_single_precision()
    folds_N = _folds(sample)
    if judged_N is not None:
        folds_N = torch.where(judged_N[rows_N], folds_N, -1)
    if not (folds_N >= 0).any():
        return Fitted(l2_penalty=UNSEEN_L2_PENALTY, temperature=1.0)
    best: tuple[float, Fitted] | None = None
    solutions: list[Linear] = []
    variance = variance_of(sample)
    for penalty in L2_PENALTIES:
        before: Sequence[Linear | None] = solutions or [None] * FOLDS
        solutions = [
            solve(
                sample.take(folds_N != fold),
                l2_penalty=penalty * variance,
                near=near,
                tolerance=TOLERANCE_TO_CHOOSE,
                iterations=ITERATIONS_TO_CHOOSE,
            )
            for fold, near in enumerate(before)
        ]
        judged = _left_out(sample, folds_N, solutions)
        temperature = fit_temperature(judged)
        found = negative_log_likelihood(judged, float(np.log(temperature)))
        if best is not None and found > best[0] - LEAST_GAIN * len(judged.labels_N):
            break  # it gets worse from here, or hardly better
        # More images need a smaller penalty.
        scaled = penalty * len(sample.labels_N) / len(problem.labels_N)
        by_sample = len(sample.labels_N) < len(problem.labels_N)
        best = found, Fitted(l2_penalty=scaled, temperature=temperature, by_sample=by_sample)
    assert best is not None
    return best[1]


def _left_out(problem: Problem, folds_N: Tensor, solutions: Sequence[Linear]) -> Judged:
    """Judge each classifier by the images that it was not fitted to."""
    logits_NC = torch.zeros(len(folds_N), problem.count, dtype=problem.tokens_NW.dtype)
    for fold, (weight_CW, bias_C) in enumerate(solutions):
        unseen = folds_N == fold
        logits_NC[unseen] = problem.tokens_NW[unseen] @ weight_CW.T + bias_C
    judged = folds_N >= 0
    return Judged(
        classes=tuple(map(str, range(problem.count))),
        labels_N=problem.labels_N[judged].numpy(),
        logits_NC=logits_NC[judged].float().numpy(),
    )


def _folds(problem: Problem) -> Tensor:
    """Spread each class evenly over the folds; the only image of a class is in none: -1."""
    by_class = torch.argsort(problem.labels_N, stable=True)
    folds_N = torch.empty_like(problem.labels_N)
    folds_N[by_class] = torch.arange(len(by_class)) % FOLDS
    return torch.where(problem.images_C[problem.labels_N] > 1, folds_N, -1)


def _sample(problem: Problem) -> Tensor:
    """Take rows of equally many images of each class, and no more than the choice needs."""
    most = max(FOLDS, IMAGES_TO_CHOOSE_BY // problem.count)
    rows = [
        torch.nonzero(problem.labels_N == place).squeeze(1)[:most] for place in range(problem.count)
    ]
    return torch.cat(rows)


def variance_of(problem: Problem) -> float:
    tokens_NW = problem.tokens_NW
    return float((tokens_NW - tokens_NW.mean(dim=0)).square().mean())


def _put(heads: nn.ModuleList, answered: Sequence[int], weight_CW: Tensor, bias_C: Tensor) -> None:
    """Write rows into the heads, in the order of the logits."""
    rows = {place: row for row, place in enumerate(answered)}
    place = 0
    with torch.no_grad():
        for head in heads:
            assert isinstance(head, nn.Linear)
            for own in range(head.out_features):
                if place in rows:
                    head.weight[own] = weight_CW[rows[place]]
                    head.bias[own] = bias_C[rows[place]]
                place += 1
