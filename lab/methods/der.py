"""Learn with DER: one more backbone a task, beside the frozen ones of older tasks.

Yan et al., DER: Dynamically Expandable Representation for Class Incremental Learning, 2021. This
is DER without masks: no backbone is pruned. The classifier is refitted from zero on balanced
epochs with a temperature, as in the paper; `refit=none` keeps the one that was learnt. The
temperature makes steps shorter, so the rate of the refit is its square times larger: at the plain
rate a short refit ends far from its optimum.

B images, C classes so far, D features of one backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.backbones import ResNet18, count_right, sgd
from lab.joined import JoinedBackbones, learn_first
from lab.method import Lesson, Method, Options
from lab.presets import Preset
from trainer.data.sampling import balanced
from trainer.learning.losses import Step, cross_entropy, expertise

TEMPERATURE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBackboneLoss:
    """Cross-entropy on all features, and of an auxiliary head on the new backbone's alone."""

    auxiliary: nn.Linear
    old: int

    def __call__(self, network: JoinedBackbones, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        with torch.no_grad():
            older = [expert(images_BCHW) for expert in network.experts[:-1]]
        newest = network.experts[-1](images_BCHW)
        logits = network.heads(torch.cat([*older, newest], dim=-1))
        asked = expertise(self.auxiliary(newest), labels_B, old_classes=self.old)
        return Step(
            loss=cross_entropy(logits, labels_B) + asked, right=count_right(logits, labels_B)
        )


def refit_loss(network: JoinedBackbones, images_BCHW: Tensor, labels_B: Tensor) -> Step:
    """Compute the cross-entropy at a temperature, on features that do not learn."""
    with torch.no_grad():
        features = network.features(images_BCHW)
    logits = network.heads(features)
    return Step(
        loss=F.cross_entropy(logits / TEMPERATURE, labels_B), right=count_right(logits, labels_B)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DerOptions(Options):
    refit: Literal["zero", "none"] = "zero"


class Der(Method):
    options_type = DerOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, DerOptions)
        self.options = options
        self.network = JoinedBackbones(ResNet18(preset.resnet_width))

    @property
    def base(self) -> str:
        return "resnet-18, cross-entropy"

    @property
    def passes(self) -> int:
        return len(self.network.experts)

    def expand(self, new: tuple[str, ...]) -> None:
        self.network.expand(len(new))

    def scores(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.network(images_BCHW)
        return scores

    def features(self, images_BCHW: Tensor) -> Tensor:
        return self.network.features(images_BCHW)

    def learn(self, lesson: Lesson) -> None:
        # A frozen backbone stays as it is: its batch norms may not follow the new images.
        self.network.eval().requires_grad_(False)
        self.network.experts[-1].train().requires_grad_(True)
        self.network.heads.requires_grad_(True)
        if not lesson.old:
            learn_first(self.network, lesson)
            return
        self._learn_backbone(lesson)
        if self.options.refit == "zero":
            self._refit(lesson)

    def _learn_backbone(self, lesson: Lesson) -> None:
        torch.manual_seed(lesson.seed)
        auxiliary = nn.Linear(self.network.backbone.width, len(lesson.new) + 1)
        lesson.fit(
            "learning",
            self.network,
            NewBackboneLoss(auxiliary=auxiliary, old=lesson.old),
            parameters=[*self.network.learnable(), *auxiliary.parameters()],
            rate=self.preset.resnet_rate,
            make_optimiser=sgd(),
        )

    def _refit(self, lesson: Lesson) -> None:
        self.network.experts.eval().requires_grad_(False)
        for one in self.network.heads.parameters():
            nn.init.zeros_(one)
        lesson.fit(
            "balanced refit",
            self.network,
            refit_loss,
            parameters=list(self.network.heads.parameters()),
            rate=TEMPERATURE**2 * self.preset.resnet_rate,
            epochs=self.preset.tuning_epochs,
            draw_epoch=balanced(lesson.images),
            make_optimiser=sgd(),
        )
