"""Small networks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from model_store.network.expert import Expert
from model_store.network.network import Network
from model_store.spec import Backbone, ExpertSpec, NetworkSpec, Readout, TaskSpec

GEOMETRY = NetworkSpec(image_size=8, patch_size=4, depth=2, head_width=8, mlp_ratio=2)
IN_SEQUENCE = replace(GEOMETRY, token="in-sequence")
BACKBONES = (
    replace(
        IN_SEQUENCE,
        backbone=Backbone(
            registers=2, rotary=True, activation="swiglu", hidden_norm=3, pooling="mean"
        ),
    ),
    replace(
        IN_SEQUENCE,
        backbone=Backbone(registers=3, qk_norm=True, activation="quick-gelu", pre_norm=True),
    ),
    replace(IN_SEQUENCE, backbone=Backbone(registers=1), qkv_bias=False),
    replace(IN_SEQUENCE, backbone=Backbone(pooling="token-and-mean")),
    replace(IN_SEQUENCE, backbone=Backbone(registers=2, qk_norm=True, pooling="token-and-mean")),
    replace(GEOMETRY, backbone=Backbone(pooling="attention", activation="tanh-gelu")),
    replace(IN_SEQUENCE, depth=4, readout=Readout(blocks=(1, 3), grid_block=3, grid=2)),
    replace(
        IN_SEQUENCE,
        patch_size=2,
        backbone=Backbone(registers=2, pooling="token-and-mean"),
        readout=Readout(blocks=(1,), grid_block=1, grid=3),
    ),
    replace(
        GEOMETRY,
        backbone=Backbone(pooling="attention"),
        readout=Readout(blocks=(1,), grid_block=1, grid=2),
    ),
)
"""Pre-trained first experts; each way in which one differs from the plain expert is in some."""
GATED = replace(GEOMETRY, attention="gated", qkv_bias=False)
CONVOLVED = replace(GATED, stem="convolutions")
LARGE_CONVOLVED = replace(CONVOLVED, image_size=48, patch_size=16)
"""The stem of an image of more than 32 pixels begins by halving it."""


def task(name: str, *, heads: int, classes: int = 2, attention_heads: int = 0) -> TaskSpec:
    names = tuple(f"{name}-{index}" for index in range(classes))
    expert = ExpertSpec(heads=heads, attention_heads=attention_heads) if heads else None
    return TaskSpec(name=name, classes=names, expert=expert)


def grown(
    heads: Sequence[int], *, geometry: NetworkSpec = GEOMETRY, seed: int = 0, noise: float = 0.3
) -> Network:
    """Grow a network task by task, with parameters far from their starting values. A task of 0
    heads has no expert."""
    torch.manual_seed(seed)
    network = Network(geometry)
    for index, count in enumerate(heads):
        network.expand(task(f"task{index}", heads=count))
        with torch.no_grad():
            for parameter in network.learnable():
                parameter.add_(noise * torch.randn_like(parameter))
    return network.eval()


def images(count: int = 3, *, size: int = 8, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator)


def experts_of(network: Network) -> list[Expert]:
    return [expert for expert in network.experts if isinstance(expert, Expert)]


def heads_of(network: Network) -> list[nn.Linear]:
    return [head for head in network.heads if isinstance(head, nn.Linear)]
