"""Fit the task heads to final tokens, as cross-validation chooses (`trainer.fitting`).

Every class weighs the same, whatever its number of images. A token may stand in for an image that
is gone (ADR 51). N tokens, W channels, V of them with weights, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.network.network import Network
from model_store.spec import NetworkSpec
from trainer.evaluation.judged import Judged
from trainer.fitting.choice import Choice, Method, Tried, choose, fit, leave_out
from trainer.fitting.problem import Linear, Problem, variance_of
from trainer.learning.losses import Classification, cross_entropy
from trainer.ranks.threads import one_thread

LEAST_DEVIATION = 1e-3
"""The least deviation of a channel that is standardised, in deviations of a usual channel: a
channel that hardly changes must not count as much as the others."""
LEAST_GAIN = 0.02
"""The gain in an image's log-likelihood for which a wide readout is taken. On ordinary photos
there is hardly so much to gain (ADR 92)."""
ORDINARY = 0.9
"""The accuracy of left-out images of the first few classes below which they are no ordinary photos,
and any gain counts: a wide readout gains more when there are more classes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Tokens to fit to, and what is known of them."""

    tokens_NV: NDArray[np.float32]
    labels_N: NDArray[np.int64]
    answered: Sequence[int]
    """Places of the logits that are fitted."""
    loss: Classification
    judged_N: NDArray[np.bool_] | None = None
    """Only these tokens tell how good a choice is; None: all do."""
    groups_N: NDArray[np.int64] | None = None
    """Images with one number are left out together; None: each is left out alone."""

    def with_tokens(self) -> list[int]:
        """List the answered places that have tokens."""
        there = set(np.unique(self.labels_N).tolist())
        return [place for place in self.answered if place in there]

    def problem(self, spec: NetworkSpec) -> Problem:
        """Pose the problem on scaled tokens, with the classes that have tokens."""
        row_of = {place: row for row, place in enumerate(self.with_tokens())}
        problem = Problem(
            tokens_NW=torch.from_numpy(self.tokens_NV).double(),
            labels_N=torch.tensor([row_of[int(label)] for label in self.labels_N]),
            count=len(row_of),
            loss=self.loss,
        )
        return problem.scaled(factors_of(spec, problem.tokens_NW))

    def tried(self, problem: Problem) -> Tried:
        return choose(
            problem,
            judged_N=None if self.judged_N is None else torch.from_numpy(self.judged_N),
            groups_N=None if self.groups_N is None else torch.from_numpy(self.groups_N),
            methods=self._methods,
        )

    def left_out(
        self, spec: NetworkSpec, choice: Choice, *, judged_N: NDArray[np.bool_]
    ) -> Judged | None:
        """Judge other tokens than those that the fit was chosen by, as it was chosen."""
        assert self.groups_N is not None
        problem = self.problem(spec).narrowed(spec.slice_width(0))
        with _threads(problem):
            judged = leave_out(
                problem,
                choice,
                judged_N=torch.from_numpy(judged_N),
                groups_N=torch.from_numpy(self.groups_N),
            )
        return None if judged is None else self.named(judged, spec)

    def named(self, judged: Judged, spec: NetworkSpec) -> Judged:
        names = tuple(spec.classes[place] for place in self.with_tokens())
        return replace(judged, classes=names)

    @property
    def _methods(self) -> tuple[Method, ...]:
        # LDA gives probabilities of classes that exclude each other, as cross-entropy asks for.
        return ("logistic", "lda") if self.loss is cross_entropy else ("logistic",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """How a classifier was fitted."""

    choice: Choice
    left_out: Judged | None
    """What cross-validation made of left-out images; None where none could be left out."""


def fit_classifier(
    network: Network, given: Given, *, former: nn.ModuleList | None = None
) -> Fitted:
    """Fit all heads to the first V channels of tokens; all other channels get weights of zero.

    Of the answered logits, those without tokens keep their `former` rows, which follow those of
    the others. Logits that are not answered stay as they are. The fit is chosen on the oldest
    expert's slice: younger experts have learnt from these very images, and would be trusted too
    much.
    """
    spec, fitted_to = network.spec, given.with_tokens()
    problem = given.problem(spec)
    oldest = problem.narrowed(spec.slice_width(0))
    with _threads(problem):
        tried = given.tried(oldest)
        choice = tried.choice
        scaled_CV, bias_C = fit(problem, choice, variance=variance_of(oldest))
    factors_V = factors_of(spec, torch.from_numpy(given.tokens_NV).double())
    weight_CW = torch.zeros(problem.count, spec.token_width, dtype=torch.float64)
    # A penalty makes the classifier too unsure: the temperature of cross-validation undoes it.
    weight_CW[:, : scaled_CV.shape[1]] = scaled_CV * factors_V / choice.temperature
    linear = weight_CW, bias_C / choice.temperature
    kept = [place for place in given.answered if place not in set(fitted_to)]
    if former is not None and kept:
        linear = _with_former_rows(linear, former, fitted_to=fitted_to, kept=kept)
    _put(network.heads, [*fitted_to, *kept], *linear)
    left_out = tried.left_out
    return Fitted(choice=choice, left_out=left_out and given.named(left_out, spec))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Readouts:
    """Cross-validation of the first expert's last block alone, and of earlier ones with it."""

    narrow: Tried
    wide: Tried

    @property
    def widens(self) -> bool:
        """Return whether earlier blocks make left-out images clearly likelier."""
        gain_M = self.narrow.losses_M - self.wide.losses_M
        if len(gain_M) < 2 or len(self.wide.losses_M) != len(self.narrow.losses_M):
            return False
        accuracy = self.narrow.choice.accuracy
        least = 0.0 if accuracy is not None and accuracy < ORDINARY else LEAST_GAIN
        return bool(gain_M.mean() > least)


def try_readouts(spec: NetworkSpec, given: Given) -> Readouts:
    """Leave out the same images for both readouts of a network that has both."""
    narrow_spec = replace(spec, readout=None)
    narrow = replace(given, tokens_NV=given.tokens_NV[:, : spec.narrow_width])
    of_narrow, of_wide = narrow.problem(narrow_spec), given.problem(spec)
    with _threads(of_wide):
        return Readouts(narrow=narrow.tried(of_narrow), wide=given.tried(of_wide))


def factors_of(spec: NetworkSpec, tokens_NV: Tensor) -> Tensor:
    """Give a factor for each channel, by which all blocks of channels count alike.

    With a readout of earlier blocks every channel is standardised. The slice of a younger expert
    has the variance, in all its channels together, of the oldest expert's last block: with that of
    its few channels it would hardly count.
    """
    deviation_V = tokens_NV.std(dim=0, correction=0)
    usual = deviation_V.square().mean().sqrt()
    if not usual:
        return torch.ones_like(deviation_V)
    oldest, narrow = spec.slice_width(0), spec.narrow_width
    factors_V = torch.ones_like(deviation_V)
    if spec.readout is not None:
        factors_V = 1 / deviation_V.clamp_min(LEAST_DEVIATION * float(usual))
    scaled_V = deviation_V * factors_V
    begin = oldest
    for index in range(1, len(spec.experts)):
        end = begin + spec.slice_width(index)
        own = float(scaled_V[begin:end].square().sum()) if end <= len(scaled_V) else 0.0
        if own:
            factors_V[begin:end] *= (float(scaled_V[:narrow].square().sum()) / own) ** 0.5
        begin = end
    return factors_V


def _threads(problem: Problem) -> AbstractContextManager[None]:
    return one_thread() if problem.is_small else nullcontext()


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
