"""The task heads on tokens that no longer change: logistic regression, drawn towards zero.

The problem is convex, so there are no epochs and no learning rate, and where it starts does not
matter; how strongly it is drawn towards zero is found by cross-validation. Every class weighs the
same, however many images it has. A class of which only exemplars are left is drawn to the weights
that it had when all its images were there. N images, W channels of the token, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.network.network import Network
from trainer.evaluation.calibrate import fit_temperature, unlikeliness
from trainer.evaluation.evaluate import Judged
from trainer.learning.losses import Classification

STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""Of the pull towards zero, for tokens of variance 1; the strongest first."""
STRENGTH_UNSEEN = 0.03
"""Where no class has two images, and nothing can be left out to choose by."""
WORTH_WEAKENING = 0.001
"""What an image's log likelihood has to gain for the next weaker pull to be tried."""
FOLDS = 5
IMAGES_TO_CHOOSE_BY = 4000
ITERATIONS = 100
TOLERANCE = 1e-6
"""Of the largest gradient."""
TOLERANCE_TO_CHOOSE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """How the classifier was fitted, and what cross-validation made of it."""

    strength: float
    temperature: float
    accuracy: float | None
    """Of images that a classifier had not seen, on the oldest expert's slice alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tokens, and the place of each one's class among `count`."""

    tokens_NW: Tensor
    labels_N: Tensor
    count: int
    loss: Classification

    def take(self, rows_N: Tensor) -> Problem:
        return replace(self, tokens_NW=self.tokens_NW[rows_N], labels_N=self.labels_N[rows_N])

    def narrowed(self, width: int) -> Problem:
        """The same on the first channels only."""
        return replace(self, tokens_NW=self.tokens_NW[:, :width])

    @property
    def images_C(self) -> Tensor:
        return torch.bincount(self.labels_N, minlength=self.count)


def fit_classifier(
    network: Network,
    tokens_NW: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    *,
    answered: Sequence[int],
    loss: Classification,
    former_CW: Tensor | None = None,
) -> Fitted:
    """Fits all heads. Each of the `answered` logits must have images; all others stay as they are.

    Strength and temperature are chosen on the oldest expert's slice: younger experts have learnt
    from these very images, and would be trusted too much. `former_CW`, a row for each logit, is
    what the heads are drawn to instead of zero.
    """
    places = {place: row for row, place in enumerate(answered)}
    problem = Problem(
        tokens_NW=torch.from_numpy(tokens_NW).double(),
        labels_N=torch.tensor([places[int(label)] for label in labels_N]),
        count=len(places),
        loss=loss,
    )
    oldest = problem.narrowed(network.spec.width_of(0))
    fitted = _choose(oldest)
    towards_CW = None
    if former_CW is not None:  # the scale on which it is fitted is not yet that of the logits
        towards_CW = former_CW[list(answered)].double().cpu() * fitted.temperature
    pull = fitted.strength * _variance(oldest)
    weight_CW, bias_C = solve(problem, pull=pull, towards_CW=towards_CW)
    # What is drawn towards zero is too unsure of itself: cross-validation says by how much.
    _put(network.heads, answered, weight_CW / fitted.temperature, bias_C / fitted.temperature)
    return fitted


def former_weights(heads: nn.ModuleList, *, width: int, trust_C: Sequence[float]) -> Tensor:
    """[C, W]: the rows that older heads had, as far as they are trusted; zero for new classes."""
    former_CW = torch.zeros(len(trust_C), width)
    row = 0
    for head in heads:
        assert isinstance(head, nn.Linear)
        rows = slice(row, row := row + head.out_features)
        former_CW[rows, : head.in_features] = head.weight.detach().cpu()
    return former_CW * torch.tensor(trust_C)[:, None]


Linear = tuple[Tensor, Tensor]
"""Weight [C, W] and bias [C]."""


def solve(
    problem: Problem,
    *,
    pull: float,
    towards_CW: Tensor | None = None,
    near: Linear | None = None,
    tolerance: float = TOLERANCE,
) -> Linear:
    """What fits the labels as well as the pull, to zero or to `towards_CW`, lets it. A solution
    that is `near` saves time, and changes nothing else."""
    mean_W = problem.tokens_NW.mean(dim=0)
    centred_NW = problem.tokens_NW - mean_W  # the bias takes up the mean, and it converges faster
    images_C = problem.images_C
    share_N = (images_C[problem.labels_N] * (images_C > 0).sum()).double().reciprocal()
    weight_CW = torch.zeros(problem.count, len(mean_W), dtype=torch.float64)
    bias_C = torch.zeros(problem.count, dtype=torch.float64)
    if near is not None:
        weight_CW, bias_C = near[0].clone(), near[1] + near[0] @ mean_W
    weight_CW.requires_grad_(True)
    bias_C.requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [weight_CW, bias_C],
        max_iter=ITERATIONS,
        tolerance_grad=tolerance,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        logits_NC = centred_NW @ weight_CW.T + bias_C
        fit = problem.loss(logits_NC, problem.labels_N, weights_B=share_N)
        away_CW = weight_CW if towards_CW is None else weight_CW - towards_CW
        total = fit + 0.5 * pull * away_CW.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(objective)  # type: ignore[no-untyped-call]
    weight, bias = weight_CW.detach(), bias_C.detach()
    return weight, bias - weight @ mean_W


def _choose(problem: Problem) -> Fitted:
    """The strength under which images that were left out are likeliest, at its own temperature."""
    sample = _sample(problem)
    folds_N = _folds(sample)
    if not (folds_N >= 0).any():
        return Fitted(strength=STRENGTH_UNSEEN, temperature=1.0, accuracy=None)
    best: tuple[float, Fitted] | None = None
    solutions: list[Linear] = []
    for strength in STRENGTHS:
        pull = strength * _variance(sample)
        before: Sequence[Linear | None] = solutions or [None] * FOLDS
        solutions = [
            solve(sample.take(folds_N != fold), pull=pull, near=near, tolerance=TOLERANCE_TO_CHOOSE)
            for fold, near in enumerate(before)
        ]
        judged = _left_out(sample, folds_N, solutions)
        temperature = fit_temperature(judged)
        found = unlikeliness(judged, float(np.log(temperature)))
        if best is not None and found > best[0] - WORTH_WEAKENING * len(judged.labels_N):
            break  # it gets worse from here, or hardly better
        # The pull is against all images together: with more of them its share is smaller.
        scaled = strength * len(sample.labels_N) / len(problem.labels_N)
        accuracy = float(judged.right_N.mean())
        best = found, Fitted(strength=scaled, temperature=temperature, accuracy=accuracy)
    assert best is not None
    return best[1]


def _left_out(problem: Problem, folds_N: Tensor, solutions: Sequence[Linear]) -> Judged:
    """What classifiers make of the images that each of them had not seen."""
    logits_NC = torch.zeros(len(folds_N), problem.count, dtype=torch.float64)
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
    """Each class spread evenly; -1, in no fold, for the only image of a class."""
    by_class = torch.argsort(problem.labels_N, stable=True)
    folds_N = torch.empty_like(problem.labels_N)
    folds_N[by_class] = torch.arange(len(by_class)) % FOLDS
    return torch.where(problem.images_C[problem.labels_N] > 1, folds_N, -1)


def _sample(problem: Problem) -> Problem:
    """As many images of a class as of any other, and no more than it takes to choose."""
    most = max(FOLDS, IMAGES_TO_CHOOSE_BY // problem.count)
    rows = [
        torch.nonzero(problem.labels_N == place).squeeze(1)[:most] for place in range(problem.count)
    ]
    return problem.take(torch.cat(rows))


def _variance(problem: Problem) -> float:
    tokens_NW = problem.tokens_NW
    return float((tokens_NW - tokens_NW.mean(dim=0)).square().mean())


def _put(heads: nn.ModuleList, answered: Sequence[int], weight_CW: Tensor, bias_C: Tensor) -> None:
    """Into the heads, row by row in the order of the logits."""
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
