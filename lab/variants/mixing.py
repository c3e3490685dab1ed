"""Define layers across tasks whose matrices are shared otherwise than in the product.

Shapes: as in `model_store/network/layers.py`; N = B·P rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Matrices = Literal["1s", "1f", "sss", "ffs", "fff", "ssf"]
"""W_q, W_k and W_v: `s` is shared by all heads, `f` is one a head. `1` stands for A = 1, where
W_q and W_k do not exist. `ssf` is the product's task attention."""


def mixing_layer(
    matrices: Matrices, *, sources: int, heads: int, reads: int, writes: int
) -> nn.Module:
    """Make the layer of a row of the paper's table of matrices, but for `ssf`."""
    if matrices in ("1s", "1f"):
        shared = matrices == "1s"
        return DenseMixing(sources=sources, heads=heads, reads=reads, writes=writes, shared=shared)
    query_key, value = matrices[0] == "f", matrices[2] == "f"
    return FlexibleAttention(
        sources=sources,
        heads=heads,
        reads=reads,
        writes=writes,
        query_key_a_head=query_key,
        value_a_head=value,
    )


class DenseMixing(nn.Module):
    """A dense layer across experts: A = 1 in task attention.

    Own heads have matrices of their own, as equal attention would make equal heads.
    """

    def __init__(self, *, sources: int, heads: int, reads: int, writes: int, shared: bool) -> None:
        super().__init__()
        self.reads, self.shared = reads, shared
        weight = torch.empty(heads * writes, sources * reads)
        nn.init.xavier_uniform_(weight)
        self.weight = nn.Parameter(weight[:, :reads].clone() if shared else weight)
        self.dense_bias = nn.Parameter(torch.zeros(heads * writes))

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        joined_BPC = torch.cat(tuple(sources), dim=-1)
        if self.shared:
            joined_BPC = joined_BPC.unflatten(-1, (-1, self.reads)).sum(dim=-2)  # type: ignore[no-untyped-call]
        return nn.functional.linear(joined_BPC, self.weight, self.dense_bias)


class FlexibleAttention(nn.Module):
    """Task attention with queries and keys, and values, either shared or of each head."""

    def __init__(
        self,
        *,
        sources: int,
        heads: int,
        reads: int,
        writes: int,
        query_key_a_head: bool,
        value_a_head: bool,
    ) -> None:
        super().__init__()
        self.heads, self.reads = heads, reads
        # As in the product: equal attention at the start, and values of one layer for all heads.
        self.query = nn.Parameter(torch.zeros(heads if query_key_a_head else 1, reads, reads))
        self.key = nn.Parameter(torch.empty(sources if query_key_a_head else 1, reads, reads))
        value = torch.empty(sources, reads, writes)
        nn.init.xavier_uniform_(value.flatten(0, 1))
        self.value = nn.Parameter(value if value_a_head else value[:1].clone())
        self.value_bias = nn.Parameter(torch.zeros(len(self.value), writes))
        self.scale = nn.Parameter(torch.full((heads,), float(max(1, sources - heads))))
        for key_DD in self.key.data:
            nn.init.xavier_uniform_(key_DD)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(tuple(sources), dim=-1)
        n_NHD = joined.view(len(joined) * joined.shape[1], -1, self.reads)
        queries_NKD = _by_head(n_NHD[:, -self.heads :], self.query)
        scores_NKH = queries_NKD @ _by_head(n_NHD, self.key).mT * self.reads**-0.5
        attention_NKH = torch.softmax(scores_NKH, dim=-1) * self.scale[:, None]
        values_NHE = _by_head(n_NHD, self.value) + self.value_bias
        return torch.bmm(attention_NKH, values_NHE).view(*joined.shape[:2], -1)


def _by_head(n_NHD: Tensor, matrices: Tensor) -> Tensor:
    """Multiply every head by its matrix [H, D, E], or all by the only one [1, D, E]."""
    if len(matrices) == 1:
        return (n_NHD.flatten(0, 1) @ matrices[0]).view(*n_NHD.shape[:2], -1)
    return torch.bmm(n_NHD.transpose(0, 1), matrices).transpose(0, 1)
