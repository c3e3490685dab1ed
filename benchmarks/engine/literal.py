"""The paper's task attention as its equations stand: what the folded form is measured against.

A key and a value for every source head, one product or einsum each and no loop over heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.network.flops import stem_flops
from model_store.network.layers import TaskAttention
from model_store.network.network import Network
from model_store.spec import NetworkSpec


class LiteralTaskAttention(TaskAttention):
    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(tuple(sources), dim=-1)
        n_BPHD = joined.view(*joined.shape[:2], -1, self.reads)
        query_BPKD = F.linear(n_BPHD[..., -self.heads :, :], self.query)
        key_BPHD = F.linear(n_BPHD, self.key)
        value_BPHE = torch.einsum("bphd,hde->bphe", n_BPHD, self.value).add_(self.value_bias)
        scores_BPKH = torch.einsum("bpkd,bphd->bpkh", query_BPKD, key_BPHD)
        attention_BPKH = torch.softmax(scores_BPKH * self.reads**-0.5, dim=-1)
        attention_BPKH *= self.scale[:, None]
        return torch.einsum("bpkh,bphe->bpke", attention_BPKH, value_BPHE).flatten(-2)


def literal(network: Network) -> Network:
    """A copy of the network that computes its task attention as the paper writes it."""
    made = copy.deepcopy(network)
    for module in made.modules():
        if isinstance(module, TaskAttention):
            module.__class__ = LiteralTaskAttention
    return made


def literal_flops(spec: NetworkSpec) -> int:
    """Count the floating-point operations of the literal form for one image, as `flops.py` does."""
    if spec.backbone is not None:
        raise ValueError("the paper has no backbone")
    in_sequence = spec.token == "in-sequence"
    positions, layers = spec.positions, spec.depth - in_sequence
    total = 2 * len(spec.classes) * spec.token_width
    for index in range(len(spec.tasks)):
        width, read = spec.width_of(index), spec.patches + 1
        linear = _task_attention_flops(spec, index) if index else 4 * spec.mlp_ratio * width**2
        attention = 8 * positions * width**2 + 4 * positions**2 * width
        if spec.attention == "gated":
            heads = spec.experts[index].attention_heads
            attention += 2 * positions**2 * (width + 3 * heads)
        total += stem_flops(spec, index)
        total += layers * (attention + positions * linear)
        total += 6 * read * width**2 + 4 * read * width + 2 * width**2 + linear
    return total


def _task_attention_flops(spec: NetworkSpec, index: int) -> int:
    own, sources = spec.experts[index].heads, spec.source_heads(index)
    narrow, wide = spec.head_width, spec.hidden_width
    total = 0
    for reads, writes in ((narrow, wide), (wide, narrow)):
        projections = 2 * (own + sources) * reads**2
        values = 2 * sources * reads * writes
        total += projections + values + 2 * own * sources * (reads + writes)
    return total
