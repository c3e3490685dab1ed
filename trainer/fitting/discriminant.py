"""Fit a classifier by linear discriminant analysis (LDA), in closed form.

Every class is a normal distribution around its mean, and all have one covariance: that of the
images around the means of their classes. It is shrunk towards a multiple of the identity, because
there are fewer images than a covariance has numbers. All classes are equally likely beforehand.

N tokens, W channels, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.fitting.problem import Linear, Problem


class Discriminant:
    """The means and the covariance of a problem, for any number of shrinkages.

    Classes without tokens get no weight.
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
