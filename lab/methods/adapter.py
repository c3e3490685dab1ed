"""Adapt a pre-trained network to task after task, by low-rank changes of all blocks.

The changes of a task learn from its images and the exemplars, beside a classifier of all classes,
and are merged into the weights, as the product does on a pre-trained start.
"""

from __future__ import annotations

from lab.backbones import Classify, Transformer
from lab.method import Lesson
from lab.plain import PlainMethod
from model_store.errors import WrongUsage
from trainer.growth.low_rank import change_layers, changes_of, merge_layers
from trainer.learning.fit import adamw
from trainer.learning.growing import HEAD_RATE_SHARE, RATE


class Adapter(PlainMethod):
    def learn(self, lesson: Lesson) -> None:
        backbone = self.network.backbone
        if not (self.preset.pretrained and isinstance(backbone, Transformer)):
            raise WrongUsage("adapter changes a pre-trained transformer: choose another preset")
        if lesson.task == 0:
            self.begin(lesson)
        change_layers(backbone, seed=lesson.seed)
        heads = list(self.network.heads.requires_grad_(True).parameters())
        lesson.fit(
            "adapting",
            self.network,
            Classify(classification=lesson.classification),
            parameters=[*changes_of(backbone), *heads],
            rate=RATE,
            epochs=self.preset.fine_epochs,
            make_optimiser=adamw(slow=heads, slow_share=HEAD_RATE_SHARE),
        )
        merge_layers(backbone)
