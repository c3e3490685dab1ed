"""Learn as iCaRL: distil the old outputs, and answer by the nearest mean of exemplars.

B images, C classes so far, O of them old, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.backbones import BackboneName, Classify, PlainNetwork, count_right
from lab.batches import over_batches
from lab.frozen import with_rows
from lab.method import Lesson, Options
from lab.methods.ncm import unit_mean
from lab.plain import PlainMethod, PlainOptions
from lab.presets import Preset
from model_store.errors import WrongUsage
from trainer.data.folders import LabelledImages
from trainer.learning.losses import Step, classification_named

TEMPERATURE = 2.0

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Compute the loss of logits [B, C] from labels [B] and the old network's logits [B, O]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IcarlOptions(PlainOptions):
    backbone: BackboneName = "resnet"
    loss: Literal["binary", "softmax"] = "binary"
    """`softmax`: cross-entropy and distillation at temperature 2, as in PyCIL."""
    flip: Literal["no", "yes"] = "no"
    """`yes`: the mean of a class is over its exemplars and their mirror images."""


class Icarl(PlainMethod):
    options_type = IcarlOptions
    means_CD: Tensor

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, IcarlOptions)
        self.options = options
        # The heads, of the same size, are counted already, and an answer needs only the means.
        self.register_buffer("means_CD", torch.zeros(0, self.network.backbone.width))

    @property
    def base(self) -> str:
        return self.kind.base_with(self._first_loss)

    def expand(self, new: tuple[str, ...]) -> None:
        super().expand(new)
        self.means_CD = with_rows(self.means_CD, len(new))

    def learn(self, lesson: Lesson) -> None:
        if not lesson.old:
            first = Classify(classification=classification_named(self._first_loss))
            self.learn_network(lesson, first)
            return
        old = deepcopy(self.network).requires_grad_(False).eval()
        del old.heads[-1]
        loss = binary_distilled if self.options.loss == "binary" else softmax_distilled
        self.learn_network(lesson, Distilled(old=old, loss=loss))

    def remember(self, exemplars: LabelledImages | None, lesson: Lesson) -> None:
        """Compute all means anew: the features of old classes have changed too."""
        if exemplars is None:
            raise WrongUsage("icarl answers by exemplars: give it a memory of one image a class")
        pixels_NHWC, labels_N = exemplars.pixels_NHWC, torch.from_numpy(exemplars.labels_N)
        views = [pixels_NHWC]
        if self.options.flip == "yes":
            views.append(pixels_NHWC[:, :, ::-1].copy())
        features_ND = torch.cat(
            [
                torch.from_numpy(
                    over_batches(view, self.features, preprocessing=lesson.preprocessing)
                )
                for view in views
            ]
        )
        labels_N = labels_N.repeat(len(views))
        for label in range(lesson.classes):
            self.means_CD[label] = unit_mean(features_ND[labels_N == label])

    def scores(self, images_BCHW: Tensor) -> Tensor:
        """Compute the cosines: the nearest mean, as all have length 1."""
        return F.normalize(self.features(images_BCHW), dim=1) @ self.means_CD.T

    @property
    def _first_loss(self) -> str:
        return "binary" if self.options.loss == "binary" else "cross-entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """The loss of a batch, with the outputs of the network as it was before the task."""

    old: PlainNetwork
    loss: Loss

    def __call__(self, network: PlainNetwork, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        logits_BC = network(images_BCHW)
        with torch.no_grad():
            taught_BO = self.old(images_BCHW)
        return Step(
            loss=self.loss(logits_BC, labels_B, taught_BO), right=count_right(logits_BC, labels_B)
        )


def binary_distilled(logits_BC: Tensor, labels_B: Tensor, taught_BO: Tensor) -> Tensor:
    """Sum binary cross-entropies: old classes to the old sigmoids, new ones to one-hot labels."""
    asked_BC = F.one_hot(labels_B, logits_BC.shape[1]).to(logits_BC.dtype)
    asked_BC[:, : taught_BO.shape[1]] = taught_BO.sigmoid()
    summed = F.binary_cross_entropy_with_logits(logits_BC, asked_BC, reduction="sum")
    return summed / len(labels_B)


def softmax_distilled(logits_BC: Tensor, labels_B: Tensor, taught_BO: Tensor) -> Tensor:
    """Add the cross-entropies to the labels and, at a temperature, to the old softmax."""
    old_BO = F.log_softmax(logits_BC[:, : taught_BO.shape[1]] / TEMPERATURE, dim=1)
    kept = -(F.softmax(taught_BO / TEMPERATURE, dim=1) * old_BO).sum() / len(labels_B)
    return F.cross_entropy(logits_BC, labels_B) + kept
