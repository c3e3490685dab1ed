"""Define the layers of an expert: spatial attention and task attention.

Shapes: B images, P positions (patches, or the token), H source heads, K heads of this expert,
D channels that a head reads, E channels that a head writes, C channels of this expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def start_linear(layer: nn.Linear) -> None:
    """Initialise weights by the width of the layer: experts may be as narrow as one head."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class SpatialAttention(nn.Module):
    """Multi-head attention among the positions of one expert, for all or the first few queries."""

    def __init__(self, *, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        batch, positions, width = x_BPC.shape
        head_width = width // self.heads
        qkv = self.qkv(x_BPC.flatten(0, 1)).view(batch, positions, 3, self.heads, head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q[:, :, :queries], k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class TaskAttention(nn.Module):
    """A linear layer across tasks: each own head attends to the heads of all experts so far.

    At every position, own head i writes scale_i · Σ_j A_ij (W_j n_j + b_j) over source heads j,
    with A_i = softmax_j((W_q n_i)·(W_k n_j)/√D). The scores are computed as n_i·(W_qᵀ W_k/√D)·n_j,
    so that no source head is projected to a key.
    """

    def __init__(self, *, sources: int, heads: int, reads: int, writes: int) -> None:
        super().__init__()
        self.heads = heads
        self.reads = reads
        # A zero query means equal attention: the layer begins as a plain dense sum.
        self.query = nn.Parameter(torch.zeros(reads, reads))
        self.key = nn.Parameter(torch.empty(reads, reads))
        self.value = nn.Parameter(torch.empty(sources, reads, writes))
        self.value_bias = nn.Parameter(torch.zeros(sources, writes))
        self.scale = nn.Parameter(torch.full((heads,), float(max(1, sources - heads))))
        nn.init.xavier_uniform_(self.key)
        nn.init.xavier_uniform_(self.value.data.flatten(0, 1))  # one layer that reads all heads

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Compute [B, P, K·E] from the features [B, P, channels] of every expert, this one last."""
        joined = torch.cat(tuple(sources), dim=-1)
        n_BPHD = joined.view(*joined.shape[:2], -1, self.reads)
        attention_BPKH = self.attention(n_BPHD) * self.scale[:, None]
        written = self._scaled_first if self.heads == 1 else self._values_first
        out_BPKE = written(attention_BPKH, n_BPHD) + _times(attention_BPKH, self.value_bias)
        return out_BPKE.flatten(-2)

    def _scaled_first(self, attention_BPKH: Tensor, n_BPHD: Tensor) -> Tensor:
        """Scale the sources and multiply: one large product for all source heads."""
        scaled = attention_BPKH.unsqueeze(-1) * n_BPHD.unsqueeze(-3)
        return _times(scaled.flatten(-2), self.value.flatten(0, 1))

    def _values_first(self, attention_BPKH: Tensor, n_BPHD: Tensor) -> Tensor:
        """Multiply once for all own heads, and mix the values after."""
        n_HND = n_BPHD.flatten(0, 1).transpose(0, 1)
        values_NHE = torch.bmm(n_HND, self.value).transpose(0, 1)
        mixed_NKE = torch.bmm(attention_BPKH.flatten(0, 1), values_NHE)
        return mixed_NKE.view(*attention_BPKH.shape[:-1], -1)

    def attention(self, n_BPHD: Tensor) -> Tensor:
        """Compute A, the weight of each source head for each own head: [B, P, K, H]."""
        own_BPKD = n_BPHD[..., -self.heads :, :]
        projected_BPKD = _times(own_BPKD, (self.query.T @ self.key) * self.reads**-0.5)
        return torch.softmax(projected_BPKD @ n_BPHD.transpose(-1, -2), dim=-1)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply over the last dimension, as one product of two matrices.

    `@` on more dimensions chooses its kernel by whether `matrix` needs a gradient, and then
    freezing an expert would change its last bits.
    """
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)
