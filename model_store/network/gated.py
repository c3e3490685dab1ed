"""Define gated attention: the gated positional self-attention (GPSA) of ConViT.

Shapes: B images, P patches on a square, H heads, D channels of a head, C = H·D.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.network.layers import SpatialAttention

GATE = 1.0
"""The start of the gates: sigmoid(1) = 0.73 of the attention goes by position."""


class GatedAttention(SpatialAttention):
    """Attention by content and by position: (1 − σ(g))·softmax(q·k/√D) + σ(g)·softmax(w·r).

    r = (x, y, x² + y²) is the way from the query's patch to the key's. Every head has its own gate
    g and weights w. Both parts sum to 1 over the keys, and so does their mixture.
    """

    def __init__(self, *, width: int, heads: int, bias: bool) -> None:
        super().__init__(width=width, heads=heads, bias=bias)
        self.gate = nn.Parameter(torch.full((heads,), GATE))
        self.locality = nn.Parameter(local_start(heads))

    def start_values(self) -> None:
        """Begin with values that are the inputs: a head copies from its place on the grid."""
        nn.init.eye_(self.qkv.weight.data[2 * self.qkv.in_features :])

    def forward(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        batch, positions, _ = x_BPC.shape
        qkv = self.qkv(x_BPC.flatten(0, 1)).view(batch, positions, 3, self.heads, -1)
        q, k, v_BHPD = qkv.permute(2, 0, 3, 1, 4)
        by_content = F.scaled_dot_product_attention(q[:, :, :queries], k, v_BHPD)
        gate_H11 = torch.sigmoid(self.gate)[:, None, None]
        mixed = (1 - gate_H11) * by_content + gate_H11 * self._by_position(v_BHPD, queries)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _by_position(self, v_BHPD: Tensor, queries: int | None) -> Tensor:
        """Mix values by the places of their patches, in one product a head for all images."""
        ways_PP3 = offsets(v_BHPD.shape[2]).to(self.locality)
        attention_HQP = by_place(self.locality, ways_PP3[:queries])
        v_HPBD = v_BHPD.permute(1, 2, 0, 3)
        mixed_HQN = torch.bmm(attention_HQP, v_HPBD.flatten(2))
        return mixed_HQN.view(*mixed_HQN.shape[:2], *v_HPBD.shape[2:]).permute(2, 0, 1, 3)


def by_place(locality_H3: Tensor, offsets_QP3: Tensor) -> Tensor:
    """Compute the attention that the places alone give: [H, Q, P]."""
    return torch.softmax(locality_H3 @ offsets_QP3.mT, dim=-1).transpose(0, 1)


def offsets(patches: int) -> Tensor:
    """Return x, y and x² + y² from each query's patch to each key's: [P, P, 3]."""
    side = math.isqrt(patches)
    if side * side != patches:
        raise ValueError(f"{patches} patches do not form a square")
    places = torch.arange(patches)
    x_PP = places[None, :] % side - places[:, None] % side
    y_PP = places[None, :] // side - places[:, None] // side
    return torch.stack((x_PP, y_PP, x_PP**2 + y_PP**2), dim=-1).float()


def local_start(heads: int) -> Tensor:
    """Put the heads' centres on a grid of √H × √H patches around the query: weights [H, 3].

    Heads that the grid has no place for begin with equal attention to all patches.
    """
    side = math.isqrt(heads)
    centre = (side - 1) / 2
    weights_H3 = torch.zeros(heads, 3)
    for head in range(side * side):
        x, y = head // side - centre, head % side - centre
        # −|r − centre|², but for a constant that the softmax drops
        weights_H3[head] = torch.tensor((2 * x, 2 * y, -1.0))
    return weights_H3
