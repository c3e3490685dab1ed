"""Learn with PODNet: several proxies a class, compared by cosine, and pooled distillation.

Douillard et al., PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning, 2020.
The answers are those of the classifier, not of the nearest mean of exemplars. New proxies begin
at the k-means of their class. The margin is of scores that are scaled already: inside the scale,
as the paper writes it, the margin drives a learnt scale below 0 within the first steps.

B images, C classes so far, K proxies a class, D features; maps [B, F, H, W] of the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.backbones import ResNet18, count_right, sgd
from lab.method import Lesson, Method, Options
from lab.presets import Preset
from lab.proxies import PROXIES, ProxyClassifier, kmeans, nca
from trainer.data.sampling import balanced
from trainer.learning.fit import normalisation_on
from trainer.learning.losses import Step

MARGIN = 0.6
STAGES_WEIGHT = 3.0
FLAT_WEIGHT = 1.0
TUNING_RATE_SHARE = 0.5


def pooled(map_BFHW: Tensor) -> Tensor:
    """Sum the squares of a map over its width and over its height; L2-normalise both as one."""
    squares = map_BFHW.square()
    return F.normalize(torch.cat([squares.sum(dim=3), squares.sum(dim=2)], dim=2).flatten(1))


def stages_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return the mean distance of pooled maps over images and stages."""
    pairs = zip(student, teacher, strict=True)
    each = [torch.linalg.vector_norm(pooled(one) - pooled(other), dim=1) for one, other in pairs]
    return torch.stack(each).mean()


def flat_distance(student_BD: Tensor, teacher_BD: Tensor) -> Tensor:
    """Return the mean of 1 − cosine, in a form that is exactly 0 for equal features."""
    apart = F.normalize(student_BD) - F.normalize(teacher_BD)
    return 0.5 * apart.square().sum(dim=1).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLoss:
    """NCA, and the distances to the backbone as it was before the task."""

    teacher: ResNet18 | None
    weight: float
    """The square root of all classes to new classes."""

    def __call__(self, podnet: Podnet, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        maps = podnet.backbone.stages(images_BCHW)
        step = podnet.classify(maps[-1].mean(dim=(2, 3)), labels_B)
        if self.teacher is None:
            return step
        with torch.no_grad():
            taught = self.teacher.stages(images_BCHW)
        flat = flat_distance(maps[-1].mean(dim=(2, 3)), taught[-1].mean(dim=(2, 3)))
        distance = STAGES_WEIGHT * stages_distance(maps, taught) + FLAT_WEIGHT * flat
        return Step(loss=step.loss + self.weight * distance, right=step.right)


def classifier_loss(podnet: Podnet, images_BCHW: Tensor, labels_B: Tensor) -> Step:
    """Compute NCA on features that do not learn."""
    with torch.no_grad():
        features = podnet.features(images_BCHW)
    return podnet.classify(features, labels_B)


class Podnet(Method):
    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        self.backbone = ResNet18(preset.resnet_width)
        self.classifier = ProxyClassifier(self.backbone.width)

    @property
    def base(self) -> str:
        return "resnet-18, cosine nca"

    def expand(self, new: tuple[str, ...]) -> None:
        self.classifier.expand(len(new))

    def learnable(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def learn(self, lesson: Lesson) -> None:
        torch.manual_seed(lesson.seed)
        teacher = deepcopy(self.backbone) if lesson.old else None
        if lesson.old:
            self._place_proxies(lesson)
        self._learn_backbone(lesson, teacher)
        if lesson.old:
            self._tune(lesson)

    def scores(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images_BCHW))
        return scores

    def features(self, images_BCHW: Tensor) -> Tensor:
        features: Tensor = self.backbone(images_BCHW)
        return features

    def classify(self, features_BD: Tensor, labels_B: Tensor) -> Step:
        """Compute NCA of features."""
        scores = self.classifier(features_BD)
        loss = nca(scores, labels_B, margin=MARGIN)
        return Step(loss=loss, right=count_right(scores, labels_B))

    def _place_proxies(self, lesson: Lesson) -> None:
        """Begin at the k-means of each new class's features, with the mean norm of old proxies."""
        old = torch.cat(list(self.classifier.proxies)[:-1])
        centres = [kmeans(self._directions(lesson, name), count=PROXIES) for name in lesson.new]
        placed = F.normalize(torch.stack(centres), dim=-1) * old.norm(dim=-1).mean()
        with torch.no_grad():
            self.classifier.proxies[-1].copy_(placed)

    @torch.no_grad()
    def _directions(self, lesson: Lesson, name: str) -> Tensor:
        pixels = lesson.images.pixels_NHWC[lesson.images.rows_of(name)]
        normalisation = normalisation_on(self.device, lesson.preprocessing)
        scaled = normalisation.scale(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
        return F.normalize(self.features(normalisation.standardise(scaled)), dim=-1)

    def _learn_backbone(self, lesson: Lesson, teacher: ResNet18 | None) -> None:
        """Learn the backbone and the new proxies; older proxies wait for the balanced tuning."""
        self.backbone.train().requires_grad_(True)
        learning = [self.classifier.proxies[-1], self.classifier.scale]
        for one in learning:
            one.requires_grad_(True)
        lesson.fit(
            "learning",
            self,
            PodLoss(teacher=teacher, weight=math.sqrt(lesson.classes / len(lesson.new))),
            parameters=[*self.backbone.parameters(), *learning],
            rate=self.preset.resnet_rate,
            make_optimiser=sgd(),
        )

    def _tune(self, lesson: Lesson) -> None:
        self.backbone.eval().requires_grad_(False)
        self.classifier.requires_grad_(True)
        lesson.fit(
            "balanced tuning",
            self,
            classifier_loss,
            parameters=list(self.classifier.parameters()),
            rate=TUNING_RATE_SHARE * self.preset.resnet_rate,
            epochs=self.preset.tuning_epochs,
            draw_epoch=balanced(lesson.images),
            make_optimiser=sgd(),
        )
