"""Change linear layers by products of two thin matrices, which learn while the layers stay.

A changed layer computes W x + b + SCALE · U (D x), with D of shape [R, in] and U of [out, R]. U
begins with zeros, so the network answers as before until the first step. Merging writes
W + SCALE · U D into an ordinary layer: the network has its old shapes and costs what it cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from model_store.network.backbone import PoolingAttention
from model_store.network.expert import Block, Expert

RANK = 8
SCALE = 2.0


class LowRank(nn.Linear):
    """A linear layer whose weights stay, and a low-rank change of them that learns."""

    def __init__(self, base: nn.Linear, *, rank: int, generator: Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        narrow = min(rank, base.in_features, base.out_features)
        drawn = torch.randn(narrow, base.in_features, generator=generator)
        self.down = nn.Parameter((drawn / math.sqrt(base.in_features)).to(base.weight.device))
        self.up = nn.Parameter(torch.zeros(base.out_features, narrow, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        changed = F.linear(F.linear(x, self.down), SCALE * self.up)
        return F.linear(x, self.weight, self.bias) + changed

    def merged(self) -> nn.Linear:
        """Return the ordinary layer with the same outputs."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer = layer.to(self.weight.device)
        with torch.no_grad():
            change = SCALE * self.up.double() @ self.down.double()
            layer.weight.copy_(self.weight.double() + change)
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


def change_layers(expert: Expert, *, seed: int, rank: int = RANK) -> None:
    """Put a low-rank change on the linear layers of all blocks, and let the last norm learn."""
    generator = Generator().manual_seed(seed)
    expert.requires_grad_(False)
    for parent, name, layer in list(_layers(expert)):
        setattr(parent, name, LowRank(layer, rank=rank, generator=generator))
    expert.norm.requires_grad_(True)


def merge_layers(expert: Expert) -> None:
    """Write all changes into the weights of ordinary layers."""
    for parent, name, layer in list(_layers(expert)):
        if isinstance(layer, LowRank):
            setattr(parent, name, layer.merged())
    expert.freeze()


def changes_of(expert: Expert) -> list[nn.Parameter]:
    """List the parameters of an expert that learn: the changes and the last norm."""
    return [one for one in expert.parameters() if one.requires_grad]


def _layers(expert: Expert) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Name the linear layers of all blocks, each with the module that it stands in."""
    for block in expert.modules():
        if not isinstance(block, Block):
            continue
        # A pooling attention cuts the weight of its `qkv` in three, and never calls the layer.
        inner = ("out",) if isinstance(block.attention, PoolingAttention) else ("qkv", "out")
        places = [(block.attention, name) for name in inner]
        for parent, name in [*places, (block, "widen"), (block, "narrow")]:
            layer = getattr(parent, name)
            if isinstance(layer, nn.Linear):
                yield parent, name, layer
