"""Describe a classification problem on tokens, change its channels without changing its fit, and
solve it by linear discriminant analysis (LDA), in closed form.

N tokens, W channels, C classes, R channels after a rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

Linear = tuple[Tensor, Tensor]
"""Weight [C, W] and bias [C]."""
SMALL = 50_000_000
"""Products of a pass (tokens × channels × classes) below which threads wait longer for each other
than they compute."""


class Loss(Protocol):
    def __call__(
        self, logits_BC: Tensor, labels_B: Tensor, *, weights_B: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of a batch's images, or their sum with these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tokens, and the class of each as an index below `count`."""

    tokens_NW: Tensor
    labels_N: Tensor
    count: int
    loss: Loss
    before_rotation: int = 0
    """The channels that the tokens had before a rotation; 0 without one."""

    def take(self, rows_N: Tensor) -> Problem:
        return replace(self, tokens_NW=self.tokens_NW[rows_N], labels_N=self.labels_N[rows_N])

    def in_single_precision(self) -> Problem:
        """Halve the time of a fit, whose tolerance must be far from the precision."""
        return replace(self, tokens_NW=self.tokens_NW.float())

    def narrowed(self, width: int) -> Problem:
        """Keep the first channels of the tokens only."""
        return replace(self, tokens_NW=self.tokens_NW[:, :width])

    def scaled(self, factors_W: Tensor) -> Problem:
        """Multiply each channel by a factor of its own: an L2 penalty then weighs it less."""
        return replace(self, tokens_NW=self.tokens_NW * factors_W.to(self.tokens_NW))

    @property
    def channels(self) -> int:
        """Count the channels, those included that a rotation has left out."""
        return self.before_rotation or self.tokens_NW.shape[1]

    @property
    def is_small(self) -> bool:
        """Return whether one thread is faster than several."""
        return self.tokens_NW.numel() * self.count < SMALL

    @property
    def images_C(self) -> Tensor:
        return torch.bincount(self.labels_N, minlength=self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """An orthonormal basis of the space that fewer tokens than channels span.

    A fit with an L2 penalty, or with a covariance shrunk towards the identity, has no weight
    outside of that space, and does not change by a rotation inside of it.
    """

    basis_WR: Tensor | None
    """None: there are as many tokens as channels, and nothing to save."""

    @classmethod
    def of(cls, tokens_NW: Tensor) -> Rotation:
        images, width = tokens_NW.shape
        if images >= width:
            return cls(basis_WR=None)
        return cls(basis_WR=torch.linalg.qr(tokens_NW.T)[0])

    def turned(self, problem: Problem) -> Problem:
        if self.basis_WR is None:
            return problem
        turned_NR = problem.tokens_NW @ self.basis_WR
        return replace(problem, tokens_NW=turned_NR, before_rotation=len(self.basis_WR))

    def back(self, linear: Linear) -> Linear:
        """Give a fit to turned tokens as one to the tokens themselves."""
        weight_CR, bias_C = linear
        return (weight_CR if self.basis_WR is None else weight_CR @ self.basis_WR.T), bias_C


def variance_of(problem: Problem) -> float:
    """Return the mean variance of a channel, which no rotation changes."""
    tokens_NW = problem.tokens_NW
    total = float((tokens_NW - tokens_NW.mean(dim=0)).square().sum())
    return total / (len(tokens_NW) * problem.channels)


class Discriminant:
    """Means and covariance of a problem, to be solved by LDA for any number of shrinkages.

    Every class is a normal distribution around its mean, and all have one covariance: that of the
    images around the means of their classes. It is shrunk towards a multiple of the identity,
    because there are fewer images than a covariance has numbers. All classes are equally likely
    beforehand. Classes without tokens get no weight.
    """

    def __init__(self, problem: Problem) -> None:
        images_C = problem.images_C
        self._seen_C = images_C > 0
        total_CW = torch.zeros(problem.count, problem.tokens_NW.shape[1]).to(problem.tokens_NW)
        total_CW.index_add_(0, problem.labels_N, problem.tokens_NW)
        means_CW = total_CW / images_C.clamp_min(1)[:, None].to(total_CW)
        around_NW = problem.tokens_NW - means_CW[problem.labels_N]
        freedom = max(1, len(problem.labels_N) - int(self._seen_C.sum()))
        self._middle_W = means_CW[self._seen_C].mean(dim=0)
        self._means_CW = (means_CW - self._middle_W) * self._seen_C[:, None]
        self._covariance_WW = around_NW.T @ around_NW / freedom
        self._level = float(self._covariance_WW.diagonal().sum()) / problem.channels

    def solve(self, *, shrinkage: float) -> Linear:
        """Fit with this share of the identity in the covariance.

        The weights of all classes sum to zero, as those of logistic regression do.
        """
        level = self._level
        if not level:  # all images of each class are the same
            level, shrinkage = 1.0, 1.0
        shrunk_WW = (1 - shrinkage) * self._covariance_WW
        shrunk_WW.diagonal().add_(shrinkage * level)
        factor_WW = torch.linalg.cholesky(shrunk_WW)
        weight_CW: Tensor = torch.cholesky_solve(self._means_CW.T, factor_WW).T
        halves_C = 0.5 * (self._means_CW * weight_CW).sum(dim=1)
        return weight_CW.contiguous(), -halves_C - weight_CW @ self._middle_W
