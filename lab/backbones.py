"""Define the backbones that methods share, the way each kind learns, and a plain network on one.

B images, D features, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.presets import Preset
from model_store.errors import WrongUsage
from model_store.network.expert import Expert
from model_store.network.network import HEAD_STD
from model_store.spec import Attention, ExpertSpec, NetworkSpec, TaskSpec
from model_store.spec import Backbone as PretrainedBackbone
from trainer.backbones.pretrained import Pretrained
from trainer.learning.fit import OptimiserFactory, adamw, muon, parameter_groups
from trainer.learning.losses import Classification, Learner, Step

MOMENTUM = 0.9
SGD_DECAY = 5e-4


class Backbone(nn.Module, ABC):
    """A module that computes features [B, width] of images."""

    width: int

    @abstractmethod
    def forward(self, images_BCHW: Tensor) -> Tensor: ...


class ResNet(Backbone):
    """A residual network for images of 32 × 32 pixels: a stem of 3 × 3 without pooling."""

    def __init__(self, widths: Sequence[int], *, blocks: int) -> None:
        super().__init__()
        self.width = widths[-1]
        self.stem = nn.Sequential(*_convolution(3, widths[0]), nn.ReLU(inplace=True))
        befores = [widths[0], *widths]
        self.layers = nn.ModuleList(
            _stage(before, width, blocks=blocks, stride=2 if place else 1)
            for place, (before, width) in enumerate(zip(befores, widths, strict=False))
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.stages(images_BCHW)[-1].mean(dim=(2, 3))

    def stages(self, images_BCHW: Tensor) -> list[Tensor]:
        """Compute the maps at the end of each stage; `forward` is the mean over the last one."""
        # A step on a CPU takes a quarter less time with channels last.
        maps = self.stem(images_BCHW.contiguous(memory_format=torch.channels_last))
        outs = []
        for layer in self.layers:
            maps = layer(maps)
            outs.append(maps)
        return outs


class ResNet18(ResNet):
    """Four stages of two blocks; the full network has a width of 64."""

    def __init__(self, width: int) -> None:
        super().__init__([width, 2 * width, 4 * width, 8 * width], blocks=2)


class ResNet32(ResNet):
    """Three stages of five blocks."""

    def __init__(self) -> None:
        super().__init__([16, 32, 64], blocks=5)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            *_convolution(before, width, stride=stride), nn.ReLU(inplace=True)
        )
        self.second = nn.Sequential(*_convolution(width, width))
        self.stride = stride
        changes = stride != 1 or before != width
        self.shortcut = (
            nn.Sequential(*_convolution(before, width, size=1)) if changes else nn.Identity()
        )

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        # oneDNN writes past its memory in a 1 × 1 convolution with stride, 4 channels and channels
        # last: the stride comes before it.
        beside = self.shortcut(maps_BCHW[:, :, :: self.stride, :: self.stride])
        return F.relu(self.second(self.first(maps_BCHW)) + beside, inplace=True)


def _stage(before: int, width: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = ResidualBlock(before, width, stride=stride)
    return nn.Sequential(first, *(ResidualBlock(width, width, stride=1) for _ in range(blocks - 1)))


def _convolution(
    before: int, width: int, *, size: int = 3, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(before, width, size, stride=stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)


class Transformer(Expert, Backbone):
    """The first expert of the product's network, alone: an ordinary vision transformer."""

    def __init__(self, preset: Preset, *, attention: Attention = "gated") -> None:
        spec = geometry(preset, attention).expand(first_task(preset))
        super().__init__(spec, index=0)
        self.preset = preset
        self.width = spec.token_width

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute the final token, as a `Network` of this expert does."""
        x_BPC = self.embed(images_BCHW)
        for layer in range(len(self.blocks) - self.token_in_sequence):
            block = self.patch_block(layer)
            x_BPC = block.mix(block.attend(x_BPC), ()).out
        if not self.token_in_sequence:
            x_BPC = self.with_token(x_BPC)
        last = self.last_block
        return self.pool(last.mix(last.attend(x_BPC, queries=1), ()).out)

    def begin(self, start: Pretrained) -> None:
        """Take pre-trained weights."""
        give(self, start, self.preset)


def geometry(preset: Preset, attention: Attention) -> NetworkSpec:
    """Describe the transformer of a preset before its first task."""
    if preset.pretrained:
        return NetworkSpec(
            image_size=preset.image_size,
            patch_size=preset.patch_size,
            depth=preset.depth,
            token="in-sequence",
            backbone=PretrainedBackbone(pooling="token-and-mean"),
        )
    return NetworkSpec(
        image_size=preset.image_size,
        patch_size=preset.patch_size,
        depth=preset.depth,
        stem=preset.stem,
        attention=attention,
        qkv_bias=attention == "plain",
    )


def first_task(preset: Preset) -> TaskSpec:
    """Describe a task with the first expert. Its class has no part in the shapes of an expert."""
    expert = ExpertSpec(heads=preset.heads, attention_heads=preset.attention_heads)
    return TaskSpec(name="all", classes=("any",), expert=expert)


def give(expert: Expert, start: Pretrained, preset: Preset) -> None:
    """Put pre-trained weights into the first expert."""
    asked = geometry(preset, "plain")
    found = replace(start.geometry, image_size=asked.image_size)
    if (found, start.expert) != (asked, first_task(preset).expert):
        raise WrongUsage(f"{preset.pretrained} is not the vision transformer of this preset")
    start.load_into(expert, geometry=asked)


def sgd() -> OptimiserFactory:
    """Make SGD with momentum, for ResNets. Norms and biases have no weight decay."""

    def make(
        network: Learner, parameters: Sequence[nn.Parameter], rate: float
    ) -> torch.optim.Optimizer:
        groups = parameter_groups(network, parameters, weight_decay=SGD_DECAY)
        return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM)

    return make


def learning_of(preset: Preset) -> OptimiserFactory:
    """Return the optimiser of transformers."""
    return muon() if preset.optimiser == "muon" else adamw()


BackboneName = Literal["resnet", "transformer", "plain-transformer"]
"""`transformer` has gated attention, as the product's network has; `plain-transformer` has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of backbone, and the way it learns in all methods."""

    make: Callable[[Preset], Backbone]
    base: str
    """The text of `Method.base`, but for the loss."""
    rate: Callable[[Preset], float]
    optimiser: Callable[[Preset], OptimiserFactory]

    def base_with(self, loss: str) -> str:
        """Name the first task as learnt with this loss: `cross-entropy`, `binary`."""
        return self.base.format(loss=loss)


KINDS: Mapping[BackboneName, Kind] = {
    "resnet": Kind(
        make=lambda preset: ResNet18(preset.resnet_width),
        base="resnet-18, {loss}",
        rate=lambda preset: preset.resnet_rate,
        optimiser=lambda preset: sgd(),
    ),
    "transformer": Kind(
        make=Transformer,
        base="gated transformer, {loss}, decay ours",
        rate=lambda preset: preset.fine_rate if preset.pretrained else preset.rate,
        optimiser=learning_of,
    ),
    "plain-transformer": Kind(
        make=partial(Transformer, attention="plain"),
        base="transformer, {loss}, decay ours",
        rate=lambda preset: preset.rate,
        optimiser=learning_of,
    ),
}


class GrowingLinear(nn.ModuleList):
    """A linear classifier that gets rows for new classes. The rows of each task are one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def grow(self, classes: int) -> None:
        head = nn.Linear(self.width, classes)
        nn.init.trunc_normal_(head.weight, std=HEAD_STD)
        nn.init.zeros_(head.bias)
        self.append(head)

    def forward(self, features_BD: Tensor) -> Tensor:
        """Compute the logits [B, C], oldest task first."""
        return torch.cat([head(features_BD) for head in self], dim=-1)


class PlainNetwork(nn.Module):
    """One backbone and a linear classifier on its features.

    Its tensors are named as in `Network`, `experts.0.…` and `heads.0.…`, and listed in the same
    order: methods that share a first task also go on from one another's checkpoints of it. For
    that, a method keeps it as `self.network`, and calls the phase of the first task `learning`.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.experts = nn.ModuleList([backbone])
        self.heads = GrowingLinear(backbone.width)

    @property
    def backbone(self) -> Backbone:
        backbone = self.experts[0]
        assert isinstance(backbone, Backbone)
        return backbone

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Compute the logits [B, C]."""
        logits: Tensor = self.heads(self.backbone(images_BCHW))
        return logits

    def learnable(self) -> list[nn.Parameter]:
        return list(self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify:
    """The loss of a plain network's logits: cross-entropy, or one binary problem a class."""

    classification: Classification

    def __call__(self, network: PlainNetwork, images_BCHW: Tensor, labels_B: Tensor) -> Step:
        logits_BC = network(images_BCHW)
        return Step(
            loss=self.classification(logits_BC, labels_B), right=count_right(logits_BC, labels_B)
        )


def count_right(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    return (logits_BC.detach().argmax(dim=-1) == labels_B).sum()
