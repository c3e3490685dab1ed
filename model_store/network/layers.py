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
        self.writes = writes
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
        # Experts are not joined: no gradient is then computed for the frozen ones.
        experts = [x_BPC.view(*x_BPC.shape[:2], -1, self.reads) for x_BPC in sources]
        attention_BPKH = self.attention(experts) * self.scale[:, None]
        # Scaled sources are K·D wide for each source head, and values E.
        few = self.heads == 1 or self.heads * self.reads < self.writes
        mixed = self._scaled_first if few else self._values_first
        out_BPKE = mixed(attention_BPKH, experts) + _times(attention_BPKH, self.value_bias)
        return out_BPKE.flatten(-2)

    def attention(self, experts: Sequence[Tensor]) -> Tensor:
        """Compute A, the weight of each source head for each own head: [B, P, K, H]."""
        projected_BPKD = _times(experts[-1], (self.query.T @ self.key) * self.reads**-0.5)
        scores = [projected_BPKD @ n_BPHD.transpose(-1, -2) for n_BPHD in experts]
        return torch.softmax(torch.cat(scores, dim=-1), dim=-1)

    def _scaled_first(self, attention_BPKH: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """Scale the sources and multiply: one large product for all source heads."""
        shares = attention_BPKH.split_with_sizes([n.shape[-2] for n in experts], dim=-1)
        scaled = [
            (share.unsqueeze(-1) * n_BPHD.unsqueeze(-3)).flatten(-2)
            for share, n_BPHD in zip(shares, experts, strict=True)
        ]
        return _times(torch.cat(scaled, dim=-1), self.value.flatten(0, 1))

    def _values_first(self, attention_BPKH: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """Multiply each source head once for all own heads, and mix the values after."""
        weights = self.value.split_with_sizes([n.shape[-2] for n in experts])
        values = [
            torch.bmm(n_BPHD.flatten(0, 1).transpose(0, 1), weight)
            for n_BPHD, weight in zip(experts, weights, strict=True)
        ]
        values_NHE = torch.cat(values).transpose(0, 1)
        mixed_NKE = torch.bmm(attention_BPKH.flatten(0, 1), values_NHE)
        return mixed_NKE.view(*attention_BPKH.shape[:-1], -1)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply over the last dimension, as one product of two matrices.

    `@` on more dimensions chooses its kernel by whether `matrix` needs a gradient, and then
    freezing an expert would change its last bits.
    """
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)
