"""Answer by the nearest class mean, on features that are frozen after the first task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.frozen import FrozenMethod, constant, with_rows
from lab.method import Lesson, Options
from lab.plain import PlainOptions
from lab.presets import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class NcmOptions(PlainOptions):
    features: Literal["normalised", "raw"] = "normalised"
    """`normalised`: features and means have length 1, so the nearest mean is the largest cosine."""


class Ncm(FrozenMethod):
    options_type = NcmOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, NcmOptions)
        self.normalised = options.features == "normalised"
        # An answer needs the means, so they count as parameters; no gradient changes them.
        self.means_CD = constant(torch.zeros(0, self.network.backbone.width))

    def expand(self, new: tuple[str, ...]) -> None:
        super().expand(new)
        self.means_CD = constant(with_rows(self.means_CD, len(new)))

    def learn_from(self, features_ND: Tensor, labels_N: Tensor, lesson: Lesson) -> None:
        for label in range(lesson.old, lesson.classes):
            own_ND = features_ND[labels_N == label]
            self.means_CD[label] = unit_mean(own_ND) if self.normalised else own_ND.mean(dim=0)

    def scores(self, images_BCHW: Tensor) -> Tensor:
        features_BD = self.features(images_BCHW)
        if self.normalised:
            return F.normalize(features_BD, dim=1) @ self.means_CD.T
        return nearness(features_BD, self.means_CD)


def unit_mean(features_ND: Tensor) -> Tensor:
    """Compute the mean direction of features: of length 1, each feature as one of length 1."""
    return F.normalize(F.normalize(features_ND, dim=1).mean(dim=0), dim=0)


def nearness(features_BD: Tensor, means_CD: Tensor) -> Tensor:
    """Compute minus the squared distances, but for a part that is equal for all classes."""
    return 2 * features_BD @ means_CD.T - means_CD.square().sum(dim=1)
