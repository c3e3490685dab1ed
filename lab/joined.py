"""Join backbones side by side, for methods that add one a task.

B images, C channels, H × W pixels.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from lab.backbones import Classify, GrowingLinear, PlainNetwork, sgd
from lab.method import Lesson
from trainer.learning.losses import cross_entropy


class JoinedBackbones(PlainNetwork):
    """Backbones side by side, and a linear classifier on the features of all."""

    def expand(self, classes: int) -> None:
        """Add a copy of the newest backbone, and rows for new classes."""
        if len(self.heads):
            self.experts.append(deepcopy(self.experts[-1]))
            self.heads = widened(self.heads, width=len(self.experts) * self.backbone.width)
        self.heads.grow(classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.features(images_BCHW))
        return logits

    def features(self, images_BCHW: Tensor) -> Tensor:
        return torch.cat([expert(images_BCHW) for expert in self.experts], dim=-1)

    def learnable(self) -> list[nn.Parameter]:
        return [*self.experts[-1].parameters(), *self.heads.parameters()]


def widened(heads: GrowingLinear, *, width: int) -> GrowingLinear:
    """Copy a classifier for more features. The new columns are 0."""
    wide = GrowingLinear(width)
    for head in heads:
        assert isinstance(head, nn.Linear)
        wide.grow(head.out_features)
        zeros = head.weight.new_zeros(head.out_features, width - head.in_features)
        columns = torch.cat([head.weight, zeros], dim=1)
        wide[-1].load_state_dict({"weight": columns, "bias": head.bias})
    return wide


def learn_first(network: PlainNetwork, lesson: Lesson) -> None:
    """Learn the first task, as all methods on a ResNet with cross-entropy do."""
    lesson.fit(
        "learning",
        network,
        Classify(classification=cross_entropy),
        parameters=network.learnable(),
        rate=lesson.preset.resnet_rate,
        make_optimiser=sgd(),
    )
