"""Answer by a linear rule from sums over images, on features frozen after the first task.

`lda` is a linear discriminant with one covariance for all classes. `ridge` is RanPAC: ridge
regression to one-hot labels, on the ReLU of a random projection. Both need the same sums, which
hold no image: for each class its count and the sum of its features, and one Gram matrix.
N images, D features, M features after the projection, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.frozen import FrozenMethod, constant, with_rows
from lab.method import Lesson, Options
from lab.plain import PlainOptions
from lab.presets import Preset

HELD_OUT = 5
"""One of so many new images is held out to choose the strength by."""
SHRINKAGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Shares of the mean variance in the covariance, to choose from."""
PENALTIES = tuple(10.0**power for power in range(-8, 9))
"""L2 penalties to choose from, as in RanPAC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LdaOptions(PlainOptions):
    rule: Literal["lda", "ridge"] = "lda"
    projection: int = 2000
    """Features of the random projection of `ridge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over images, in double precision."""

    counts_C: Tensor
    sums_CM: Tensor
    gram_MM: Tensor

    def plus(self, features_NM: Tensor, labels_N: Tensor) -> Sums:
        features_NM = features_NM.double()
        asked_NC = F.one_hot(labels_N, len(self.counts_C)).double()
        return Sums(
            counts_C=self.counts_C + asked_NC.sum(dim=0),
            sums_CM=self.sums_CM + asked_NC.T @ features_NM,
            gram_MM=self.gram_MM + features_NM.T @ features_NM,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    weight_CM: Tensor
    bias_C: Tensor

    def __call__(self, features_NM: Tensor) -> Tensor:
        return features_NM.double() @ self.weight_CM.T + self.bias_C


def discriminant(sums: Sums, shrinkage: float) -> Linear:
    """Solve a linear discriminant of equally likely classes, from a shrunk covariance."""
    means_CM = sums.sums_CM / sums.counts_C.clamp_min(1)[:, None]
    scatter_MM = sums.gram_MM - (sums.counts_C[:, None] * means_CM).T @ means_CM
    covariance_MM = scatter_MM / (sums.counts_C.sum() - len(sums.counts_C)).clamp_min(1)
    variance = covariance_MM.diagonal().mean()
    identity_MM = torch.eye(len(covariance_MM), dtype=torch.float64)
    shrunk_MM = (1 - shrinkage) * covariance_MM + shrinkage * variance * identity_MM
    weight_CM = torch.linalg.solve(shrunk_MM, means_CM.T).T
    return Linear(weight_CM=weight_CM, bias_C=-0.5 * (weight_CM * means_CM).sum(dim=1))


def ridge(sums: Sums, penalty: float) -> Linear:
    """Solve ridge regression to one-hot labels, without a bias."""
    identity_MM = torch.eye(len(sums.gram_MM), dtype=torch.float64)
    weight_CM = torch.linalg.solve(sums.gram_MM + penalty * identity_MM, sums.sums_CM.T).T
    return Linear(weight_CM=weight_CM, bias_C=torch.zeros(len(weight_CM), dtype=torch.float64))


def squared_error(scores_NC: Tensor, labels_N: Tensor) -> Tensor:
    return F.mse_loss(scores_NC, F.one_hot(labels_N, scores_NC.shape[1]).double())


class Lda(FrozenMethod):
    options_type = LdaOptions
    gram_MM: Tensor
    sums_CM: Tensor
    counts_C: Tensor

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, LdaOptions)
        self.projects = options.rule == "ridge"
        self.solve = ridge if self.projects else discriminant
        self.strengths = PENALTIES if self.projects else SHRINKAGES
        self.loss = squared_error if self.projects else F.cross_entropy
        width = self.network.backbone.width
        wide = options.projection if self.projects else width
        if self.projects:
            self.projection_DM = constant(torch.randn(width, wide))
        self.weight_CM, self.bias_C = constant(torch.zeros(0, wide)), constant(torch.zeros(0))
        self.register_buffer("gram_MM", torch.zeros(wide, wide, dtype=torch.float64))
        self.register_buffer("sums_CM", torch.zeros(0, wide, dtype=torch.float64))
        self.register_buffer("counts_C", torch.zeros(0, dtype=torch.float64))

    def expand(self, new: tuple[str, ...]) -> None:
        super().expand(new)
        for name in ("weight_CM", "bias_C"):
            setattr(self, name, constant(with_rows(getattr(self, name), len(new))))
        for name in ("sums_CM", "counts_C"):
            setattr(self, name, with_rows(getattr(self, name), len(new)))

    def learn_from(self, features_ND: Tensor, labels_N: Tensor, lesson: Lesson) -> None:
        features_NM = self._projected(features_ND)
        held_N = torch.arange(len(labels_N)) % HELD_OUT == 0
        before = Sums(counts_C=self.counts_C, sums_CM=self.sums_CM, gram_MM=self.gram_MM)
        seen = before.plus(features_NM[~held_N], labels_N[~held_N])
        strength = self._choose(seen, features_NM[held_N], labels_N[held_N])
        self._keep(seen.plus(features_NM[held_N], labels_N[held_N]), strength)

    def scores(self, images_BCHW: Tensor) -> Tensor:
        return self._projected(self.features(images_BCHW)) @ self.weight_CM.T + self.bias_C

    def _projected(self, features_ND: Tensor) -> Tensor:
        return F.relu(features_ND @ self.projection_DM) if self.projects else features_ND

    def _choose(self, seen: Sums, features_NM: Tensor, labels_N: Tensor) -> float:
        """Choose the strength by the loss on new images that are not in the sums."""

        def loss_at(strength: float) -> float:
            loss = float(self.loss(self.solve(seen, strength)(features_NM), labels_N))
            return loss if math.isfinite(loss) else math.inf

        return min(self.strengths, key=loss_at)

    def _keep(self, sums: Sums, strength: float) -> None:
        self.counts_C, self.sums_CM, self.gram_MM = sums.counts_C, sums.sums_CM, sums.gram_MM
        solution = self.solve(sums, strength)
        self.weight_CM.copy_(solution.weight_CM)
        self.bias_C.copy_(solution.bias_C)
