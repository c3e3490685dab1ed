"""Variants of the network compute what their formulas say."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.variants.gated import GatedAttention, local_start, offsets


def gated_by_loops(layer: GatedAttention, x_PC: Tensor) -> Tensor:
    """Compute gated positional attention of one image, one number after the other."""
    patches, width = x_PC.shape
    depth, side = width // layer.heads, math.isqrt(patches)
    q, k, v = (x_PC @ part.T for part in layer.qkv.weight.detach().split(width))
    mixed = torch.zeros(patches, width)
    for head in range(layer.heads):
        own = slice(head * depth, (head + 1) * depth)
        gate = 1 / (1 + math.exp(-float(layer.gate.detach()[head])))
        for query in range(patches):
            content, position = [], []
            for key in range(patches):
                x, y = key % side - query % side, key // side - query // side
                way = torch.tensor((x, y, x * x + y * y), dtype=torch.float32)
                content.append(float(q[query, own] @ k[key, own]) / math.sqrt(depth))
                position.append(float(layer.locality[head].detach() @ way))
            weights = (1 - gate) * _softmax(content) + gate * _softmax(position)
            mixed[query, own] = weights @ v[:, own]
    return mixed @ layer.out.weight.detach().T + layer.out.bias.detach()


def _softmax(scores: list[float]) -> Tensor:
    powers = [math.exp(one - max(scores)) for one in scores]
    return torch.tensor([one / sum(powers) for one in powers])


def test_gated_attention_is_what_plain_loops_compute() -> None:
    torch.manual_seed(0)
    layer = GatedAttention(width=6, heads=3, patches=9)
    torch.nn.init.normal_(layer.locality)
    torch.nn.init.normal_(layer.gate)
    x_BPC = torch.randn(2, 9, 6)
    expected = torch.stack([gated_by_loops(layer, x_PC) for x_PC in x_BPC])
    assert torch.allclose(layer(x_BPC), expected, atol=1e-5)
    assert torch.allclose(layer(x_BPC, queries=2), expected[:, :2], atol=1e-5)


def test_the_heads_of_gated_attention_begin_on_a_grid_around_the_patch() -> None:
    scores_QHP = local_start(9) @ offsets(25).mT
    middle = 12
    assert scores_QHP[middle].argmax(dim=-1).tolist() == [6, 11, 16, 7, 12, 17, 8, 13, 18]
    assert local_start(1).tolist() == [[0.0, 0.0, -1.0]]
    assert local_start(12)[9:].tolist() == [[0.0, 0.0, 0.0]] * 3
