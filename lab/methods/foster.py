"""Learn with FOSTER: a second backbone boosts the old one, then one backbone learns from both.

Wang et al., FOSTER: Feature Boosting and Compression for Class-Incremental Learning, 2022. The
whole joint classifier learns, old rows from their old weights on. There is no weight alignment.

B images, C classes so far, D features of one backbone.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.backbones import PlainNetwork, ResNet18, count_right, sgd
from lab.joined import learn_first, widened
from lab.method import Lesson, Method, Options
from lab.presets import Preset
from trainer.learning.losses import Step, distillation

BOOSTING_BETA = 0.96
COMPRESSION_BETA = 0.97
TEMPERATURE = 2.0
COMPRESSION_SHARE = 130 / 170
"""The epochs of compression for each epoch of boosting, as in the paper."""


class Boosting(nn.Module):
    """The network that stays, and the larger one that it learns from: two backbones, joined."""

    def __init__(self, network: PlainNetwork, *, classes: int) -> None:
        super().__init__()
        width = network.backbone.width
        self.network = network
        self.before = deepcopy(network.backbone).eval()
        self.second = deepcopy(network.backbone).requires_grad_(True)
        # The second backbone begins without a say in the old classes.
        self.joint = widened(network.heads, width=2 * width)
        self.auxiliary = nn.Linear(width, classes)

    def boosters(self) -> list[nn.Parameter]:
        parts = (self.second, self.joint, self.auxiliary)
        return [one for part in parts for one in part.parameters()]

    def learnable(self) -> list[nn.Parameter]:
        return [*self.network.learnable(), *self.boosters()]

    @property
    def device(self) -> torch.device:
        return self.network.device


def class_weights(counts_C: Tensor, *, beta: float) -> Tensor:
    """Weight classes by the inverse of their effective number of images; the mean is 1."""
    inverse_C = (1 - beta) / (1 - beta**counts_C)
    return inverse_C / inverse_C.mean()


def balanced_distillation(student_BC: Tensor, teacher_BC: Tensor, weights_C: Tensor) -> Tensor:
    """Return the cross-entropy to the teacher's probabilities, weighted by class.

    A temperature makes gradients smaller by its square, which many epochs hide and few do not.
    """
    asked_BC = (teacher_BC / TEMPERATURE).softmax(dim=1) * weights_C
    asked_BC = asked_BC / asked_BC.sum(dim=1, keepdim=True)
    loss = -(asked_BC * (student_BC / TEMPERATURE).log_softmax(dim=1)).sum(dim=1).mean()
    return TEMPERATURE**2 * loss


@dataclass(frozen=True, slots=True, kw_only=True)
class BoostingLoss:
    """Cross-entropy of aligned logits, the second backbone's own, and distillation of old ones."""

    old: int
    weights_C: Tensor

    def __call__(self, both: Boosting, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        with torch.no_grad():
            before = both.before(images_BCHW)
            taught = both.network.heads(before)[:, : self.old]
        second = both.second(images_BCHW)
        logits = both.joint(torch.cat([before, second], dim=-1))
        loss = (
            F.cross_entropy(logits / self.weights_C, labels_B)
            + F.cross_entropy(both.auxiliary(second), labels_B)
            + distillation(logits[:, : self.old] / TEMPERATURE, taught / TEMPERATURE)
        )
        return Step(loss=loss, right=count_right(logits, labels_B))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionLoss:
    """Balanced distillation of both backbones into the one that stays."""

    weights_C: Tensor

    def __call__(self, both: Boosting, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        with torch.no_grad():
            parts = [both.before(images_BCHW), both.second(images_BCHW)]
            taught = both.joint(torch.cat(parts, dim=-1))
        logits = both.network(images_BCHW)
        return Step(
            loss=balanced_distillation(logits, taught, self.weights_C),
            right=count_right(logits, labels_B),
        )


def boost(both: Boosting, lesson: Lesson, *, weights_C: Tensor) -> None:
    """Teach the second backbone, and a classifier on the features of both."""
    both.second.train()
    lesson.fit(
        "boosting",
        both,
        BoostingLoss(old=lesson.old, weights_C=weights_C),
        parameters=both.boosters(),
        rate=lesson.preset.resnet_rate,
        make_optimiser=sgd(),
    )


def compress(both: Boosting, lesson: Lesson, *, weights_C: Tensor) -> None:
    """Teach the network that stays to answer as both backbones do."""
    both.second.eval()
    both.network.train().requires_grad_(True)
    lesson.fit(
        "compression",
        both,
        CompressionLoss(weights_C=weights_C),
        parameters=both.network.learnable(),
        rate=lesson.preset.resnet_rate,
        epochs=max(1, round(COMPRESSION_SHARE * lesson.epochs)),
        make_optimiser=sgd(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FosterOptions(Options):
    compression: Literal["plain", "balanced"] = "plain"
    """`balanced`: weights for classes with few images, as in the paper. They take about two from
    the logits of new classes, which is more than short learning gives them."""


class Foster(Method):
    options_type = FosterOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, FosterOptions)
        self.options = options
        self.network = PlainNetwork(ResNet18(preset.resnet_width))

    @property
    def base(self) -> str:
        return "resnet-18, cross-entropy"

    def expand(self, new: tuple[str, ...]) -> None:
        self.network.heads.grow(len(new))

    def scores(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.network(images_BCHW)
        return scores

    def features(self, images_BCHW: Tensor) -> Tensor:
        features: Tensor = self.network.backbone(images_BCHW)
        return features

    def learn(self, lesson: Lesson) -> None:
        if not lesson.old:
            learn_first(self.network.train().requires_grad_(True), lesson)
            return
        torch.manual_seed(lesson.seed)
        both = Boosting(self.network, classes=lesson.classes)
        counts_C = torch.from_numpy(np.bincount(lesson.images.labels_N, minlength=lesson.classes))
        boost(both, lesson, weights_C=class_weights(counts_C, beta=BOOSTING_BETA))
        weights_C = torch.ones(lesson.classes)
        if self.options.compression == "balanced":
            weights_C = class_weights(counts_C, beta=COMPRESSION_BETA)
        compress(both, lesson, weights_C=weights_C)
