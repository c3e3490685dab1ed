"""Fine-tune the whole network with new images and exemplars, then the classifier in balance."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.backbones import PlainNetwork, count_right
from lab.method import Lesson
from lab.plain import PlainMethod
from trainer.data.sampling import balanced, can_be_balanced
from trainer.learning.losses import Step, cross_entropy
from trainer.learning.plan import TUNING_RATE_SHARE


class Replay(PlainMethod):
    def learn(self, lesson: Lesson) -> None:
        if lesson.task == 0:
            self.begin(lesson)
        self.learn_network(lesson)
        tunes = self.preset.tuning_epochs > 0 and can_be_balanced(lesson.images)
        if lesson.old and tunes:
            self._tune(lesson)

    def _tune(self, lesson: Lesson) -> None:
        """Undo the bias against old classes, in the classifier alone."""
        self.network.eval()
        lesson.fit(
            "balanced tuning",
            self.network,
            classify_frozen,
            parameters=list(self.network.heads.parameters()),
            rate=TUNING_RATE_SHARE * self.kind.rate(self.preset),
            epochs=self.preset.tuning_epochs,
            draw_epoch=balanced(lesson.images),
            make_optimiser=self.kind.optimiser(self.preset),
        )


def classify_frozen(network: PlainNetwork, images_BCHW: Tensor, labels_B: Tensor) -> Step:
    """Compute the cross-entropy of a classifier on features that do not change."""
    with torch.no_grad():
        features_BD = network.backbone(images_BCHW)
    logits_BC = network.heads(features_BD)
    return Step(loss=cross_entropy(logits_BC, labels_B), right=count_right(logits_BC, labels_B))
