"""Compute parts of an expert by themselves.

Shapes: B images, P patches or positions, C channels, D channels of a head.
"""

from __future__ import annotations

from torch import Tensor

from model_store.network.expert import Block, Expert
from model_store.network.layers import SpatialAttention


def patches(expert: Expert, images_BCHW: Tensor) -> Tensor:
    """Compute the patches of an expert that reads no other, before its token: [B, P, C]."""
    x_BPC = expert.embed(images_BCHW)
    for layer in range(len(expert.blocks)):
        block = expert.patch_block(layer)
        x_BPC = block.mix(block.attend(x_BPC), []).out
    return x_BPC


def qkv_heads(block: Block, x_BPC: Tensor) -> Tensor:
    """Compute the queries, keys and values of a block's heads: [3, B, heads, P, D]."""
    attention = block.attention
    assert isinstance(attention, SpatialAttention)
    qkv = attention.qkv(block.norm1(x_BPC)).view(*x_BPC.shape[:2], 3, attention.heads, -1)
    parts: Tensor = qkv.permute(2, 0, 3, 1, 4)
    return parts
