"""Define the part that methods with one backbone and a linear classifier share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lab.backbones import KINDS, BackboneName, Classify, PlainNetwork, Transformer
from lab.method import Lesson, Method, Options
from lab.presets import Preset
from trainer.learning.losses import BatchLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions(Options):
    backbone: BackboneName = "transformer"


class PlainMethod(Method):
    """A method whose first task is learnt by a plain network, with cross-entropy unless told."""

    options_type = PlainOptions

    def __init__(self, preset: Preset, options: Options) -> None:
        super().__init__(preset, options)
        assert isinstance(options, PlainOptions)
        self.kind = KINDS[options.backbone]
        self.network = PlainNetwork(self.kind.make(preset))

    @property
    def base(self) -> str | None:
        return None if self.preset.pretrained else self.kind.base_with("cross-entropy")

    def base_module(self) -> nn.Module:
        return nn.ModuleDict({"network": self.network})

    def expand(self, new: tuple[str, ...]) -> None:
        self.network.heads.grow(len(new))

    def begin(self, lesson: Lesson) -> None:
        """Take pre-trained weights, where the preset has them."""
        if lesson.start is not None:
            assert isinstance(self.network.backbone, Transformer)
            self.network.backbone.begin(lesson.start)

    def learn_network(
        self,
        lesson: Lesson,
        loss: BatchLoss[PlainNetwork] | None = None,
        *,
        epochs: int | None = None,
    ) -> None:
        """Learn the whole network, backbone and classifier; without a loss by the preset's."""
        self.network.train().requires_grad_(True)
        lesson.fit(
            "learning",
            self.network,
            loss or Classify(classification=lesson.classification),
            parameters=self.network.learnable(),
            rate=self.kind.rate(self.preset),
            epochs=self.preset.fine_epochs if self.preset.pretrained else epochs,
            make_optimiser=self.kind.optimiser(self.preset),
        )

    def scores(self, images_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.network(images_BCHW)
        return scores

    def features(self, images_BCHW: Tensor) -> Tensor:
        features: Tensor = self.network.backbone(images_BCHW)
        return features
