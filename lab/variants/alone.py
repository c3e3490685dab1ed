"""Compute an expert that reads no other one, and a class-attention block for several tokens.

Shapes: B images, P patches, T tokens, C channels, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.network.expert import Block, Expert
from model_store.network.layers import SpatialAttention


def patches(expert: Expert, images_BCHW: Tensor) -> Tensor:
    """Compute the patches after the last patch block: [B, P, C]."""
    x_BPC = expert.embed(images_BCHW)
    for layer in range(len(expert.blocks)):
        block = expert.patch_block(layer)
        x_BPC = block.mix(block.attend(x_BPC), []).out
    return x_BPC


def tokens_apart(block: Block, tokens_TC: Tensor, patches_BPC: Tensor) -> Tensor:
    """Let every token read itself and the patches, and no other token: [B, T, C].

    All tokens go through the block in one pass, which projects the patches once.
    """
    count, positions = len(tokens_TC), patches_BPC.shape[1]
    tokens_BTC = tokens_TC.expand(len(patches_BPC), -1, -1)
    q, k, v = qkv_heads(block, torch.cat((tokens_BTC, patches_BPC), dim=1))
    sees = torch.cat((torch.eye(count), torch.ones(count, positions)), dim=1).bool()
    sees = sees.to(patches_BPC.device)
    mixed_BHTD = F.scaled_dot_product_attention(q[:, :, :count], k, v, attn_mask=sees)
    read = _spatial(block).out(mixed_BHTD.transpose(1, 2).flatten(2))
    return block.mix(tokens_BTC + read, []).out


def qkv_heads(block: Block, x_BPC: Tensor) -> Tensor:
    """Compute the queries, keys and values of a block's heads: [3, B, heads, P, D]."""
    attention = _spatial(block)
    qkv = attention.qkv(block.norm1(x_BPC)).view(*x_BPC.shape[:2], 3, attention.heads, -1)
    parts: Tensor = qkv.permute(2, 0, 3, 1, 4)
    return parts


def _spatial(block: Block) -> SpatialAttention:
    assert isinstance(block.attention, SpatialAttention)
    return block.attention
