"""Compute DyTox's form of the network: one expert, read by a token of each task.

Shapes: B images, P patches, T tasks, C channels, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.variants.alone import patches, qkv_heads
from model_store.network.expert import TOKEN_STD, Block
from model_store.network.layers import SpatialAttention
from model_store.network.network import HEAD_STD, Network


class TaskPart(nn.Module):
    """The parts of a later task: its token, the norm of its embedding, its classifier."""

    def __init__(self, *, width: int, classes: int, eps: float) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=TOKEN_STD))
        self.norm = nn.LayerNorm(width, eps=eps)
        self.head = task_head(width, classes)


def task_head(width: int, classes: int) -> nn.Linear:
    """Make a classifier that begins as the product's do."""
    head = nn.Linear(width, classes)
    nn.init.trunc_normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    return head


def embeddings(network: Network, later: Sequence[TaskPart], images_BCHW: Tensor) -> list[Tensor]:
    """Compute the normalised embedding [B, C] of each task. The first has the expert's parts."""
    expert = network.newest
    tokens_TC = torch.stack([expert.token, *(part.token for part in later)])
    out_BTC = tokens_apart(expert.class_block, tokens_TC, patches(expert, images_BCHW))
    norms = [expert.norm, *(part.norm for part in later)]
    return [norm(out_BTC[:, task]) for task, norm in enumerate(norms)]


def classify(network: Network, later: Sequence[TaskPart], embedded: Sequence[Tensor]) -> Tensor:
    """Let every classifier read the embedding of its own task alone."""
    heads = [*network.heads, *(part.head for part in later)]
    return torch.cat([head(one) for head, one in zip(heads, embedded, strict=True)], dim=-1)


def tokens_apart(block: Block, tokens_TC: Tensor, patches_BPC: Tensor) -> Tensor:
    """Let every token read itself and the patches, and no other token: [B, T, C].

    All tokens go through the block in one pass, which projects the patches once.
    """
    count, positions = len(tokens_TC), patches_BPC.shape[1]
    tokens_BTC = tokens_TC.expand(len(patches_BPC), -1, -1)
    q, k, v = qkv_heads(block, torch.cat((tokens_BTC, patches_BPC), dim=1))
    own = torch.eye(count, dtype=torch.bool, device=q.device)
    sees = torch.cat((own, own.new_ones(count, positions)), dim=1)
    mixed_BHTD = F.scaled_dot_product_attention(q[:, :, :count], k, v, attn_mask=sees)
    assert isinstance(block.attention, SpatialAttention)
    read = block.attention.out(mixed_BHTD.transpose(1, 2).flatten(2))
    return block.mix(tokens_BTC + read, []).out
