"""Define the layers that only a pre-trained first expert has (`spec.Backbone`).

Shapes: B images, P positions, H attention heads, D channels of an attention head, R = D/2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.network.layers import SpatialAttention
from model_store.spec import Activation

QUICK = 1.702
"""The factor of quick GELU, x·σ(1.702·x)."""


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply the function between two linear layers. SwiGLU halves the last dimension."""
    if kind == "gelu":
        return F.gelu(x)
    if kind == "tanh-gelu":
        return F.gelu(x, approximate="tanh")
    if kind == "quick-gelu":
        return x * torch.sigmoid(QUICK * x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def standardise(hidden: Tensor, *, channels: int, eps: float) -> Tensor:
    """Apply a LayerNorm without scale and bias to the first channels, if any; zero the others."""
    if not channels:
        return hidden
    normed = F.layer_norm(hidden[..., :channels], (channels,), eps=eps)
    return F.pad(normed, (0, hidden.shape[-1] - channels))


class Rotary(nn.Module):
    """The angles by which the queries and keys of patches are turned: [patches, R].

    Channels i and i + R of a head are the two coordinates that angle i turns. Token and registers
    stand before and after the patches, and are not turned.
    """

    def __init__(self, *, patches: int, turned: int, before: int, after: int) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.zeros(patches, turned))
        self._before = before
        self._after = after

    def forward(self, x_BHPD: Tensor) -> Tensor:
        return turn(x_BHPD, *tables(self.angles, before=self._before, after=self._after))


def tables(angles_PR: Tensor, *, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for all rows, [P, D] each; rows that are not turned have angle 0.

    The sines of the first R channels are negative: see `turn`.
    """
    angles = F.pad(angles_PR, (0, 0, before, after))
    sin = torch.sin(angles)
    return torch.cos(angles).repeat(1, 2), torch.cat((-sin, sin), dim=-1)


def turn(x_BHPD: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    """Turn each pair (a, b) of channels to (a·cos − b·sin, b·cos + a·sin)."""
    first, second = x_BHPD.chunk(2, dim=-1)
    return x_BHPD * cos_PD + torch.cat((second, first), dim=-1) * sin_PD


class BackboneAttention(SpatialAttention):
    """Spatial attention whose queries and keys may be normalised for each head, and turned."""

    def __init__(self, *, width: int, heads: int, bias: bool, qk_norm: bool, eps: float) -> None:
        super().__init__(width=width, heads=heads, bias=bias)
        own = width // heads
        self.q_norm: nn.Module = nn.LayerNorm(own, eps=eps) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.LayerNorm(own, eps=eps) if qk_norm else nn.Identity()
        self._rotary: tuple[nn.Module, ...] = ()

    def turn_by(self, rotary: Rotary) -> None:
        """Share the angles of the expert, which stay the expert's own."""
        self._rotary = (rotary,)

    def forward(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        batch, positions, _ = x_BPC.shape
        qkv = self.qkv(x_BPC.flatten(0, 1)).view(batch, positions, 3, self.heads, -1)
        q, k, v_BHPD = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        for rotary in self._rotary:
            q, k = rotary(q), rotary(k)
        mixed = F.scaled_dot_product_attention(q[:, :, :queries], k, v_BHPD)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class PoolingAttention(SpatialAttention):
    """Attention of a learnt query, as it is, to patches: [B, 1, C] of a query [B, 1, C]."""

    def pool(self, query_B1C: Tensor, patches_BPC: Tensor) -> Tensor:
        batch, _, width = query_B1C.shape
        weights = self.qkv.weight.chunk(3)
        biases = (None, None, None) if self.qkv.bias is None else self.qkv.bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(batch, -1, self.heads, width // self.heads)
            for x, weight, bias in zip(
                (query_B1C, patches_BPC, patches_BPC), weights, biases, strict=True
            )
        )
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
