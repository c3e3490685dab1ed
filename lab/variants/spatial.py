"""Define spatial attention that reads older experts: the paper's ablations of its first half.

Shapes: B images, P positions, Q of them queries, H heads of all experts so far, K of them own,
D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.network.layers import SpatialAttention, TaskAttention, start_linear
from model_store.network.network import Network
from model_store.spec import NetworkSpec

SpatialTask = Literal["ia", "spdh", "dpdh", "both"]
Group = Literal["SPSH", "DPSH", "SPDH", "DPDH"]
"""Same or different position (the paper's patch), same or different head."""
GROUPS: tuple[Group, ...] = get_args(Group)

ALLOWED: dict[SpatialTask, tuple[Group, ...]] = {
    "ia": ("SPSH", "DPSH"),
    "spdh": ("SPSH", "DPSH", "SPDH"),
    "dpdh": ("SPSH", "DPSH", "DPDH"),
    "both": ("SPSH", "DPSH", "SPDH", "DPDH"),
}


def group_masks(*, own: int, heads: int, queries: int, positions: int) -> dict[Group, Tensor]:
    """Mark the pairs of each group: [K·Q, H·P], the own heads being the last of all heads."""
    same_head = torch.eye(heads, dtype=torch.bool)[-own:, None, :, None]
    same_position = torch.eye(positions, dtype=torch.bool)[None, :queries, None, :]
    groups: dict[Group, Tensor] = {
        "SPSH": same_head & same_position,
        "DPSH": same_head & ~same_position,
        "SPDH": ~same_head & same_position,
        "DPDH": ~same_head & ~same_position,
    }
    return {name: mask.flatten(0, 1).flatten(1) for name, mask in groups.items()}


class SpatialTaskAttention(SpatialAttention):
    """One softmax over expert, head and position.

    The keys and values of older experts are those of their own attention, so the layer has the
    parameters of independent attention.
    """

    def __init__(self, *, width: int, heads: int, bias: bool, kind: SpatialTask) -> None:
        super().__init__(width=width, heads=heads, bias=bias)
        self.kind = kind
        start_linear(self.qkv)
        start_linear(self.out)

    def forward(  # type: ignore[override]  # of all experts, not of one
        self, qkv: Sequence[Tensor], *, queries: int | None = None
    ) -> Tensor:
        """Attend from this expert, the last one, to all: [B, Q, C] from [3, B, heads, P, D]."""
        q_BKQD, k_BND, v_BND, masks = self._parts(qkv, queries)
        mixed = F.scaled_dot_product_attention(
            q_BKQD.flatten(1, 2), k_BND, v_BND, attn_mask=self._allowed(masks)
        )
        out: Tensor = self.out(mixed.view(q_BKQD.shape).transpose(1, 2).flatten(2))
        return out

    def groups(self, qkv: Sequence[Tensor]) -> tuple[Tensor, dict[Group, Tensor]]:
        """Compute the attention [B, K·P, H·P] and the masks of its groups."""
        q_BKPD, k_BND, _, masks = self._parts(qkv, None)
        scores = q_BKPD.flatten(1, 2) @ k_BND.mT * q_BKPD.shape[-1] ** -0.5
        scores = scores.masked_fill(~self._allowed(masks), -torch.inf)
        return torch.softmax(scores, dim=-1), masks

    def _allowed(self, masks: dict[Group, Tensor]) -> Tensor:
        return torch.stack([masks[name] for name in ALLOWED[self.kind]]).any(dim=0)

    def _parts(
        self, qkv: Sequence[Tensor], queries: int | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[Group, Tensor]]:
        q_BKQD = qkv[-1][0][:, :, :queries]
        _, k_BHPD, v_BHPD = torch.cat(tuple(qkv), dim=2)
        masks = group_masks(
            own=self.heads,
            heads=k_BHPD.shape[1],
            queries=q_BKQD.shape[2],
            positions=k_BHPD.shape[2],
        )
        return q_BKQD, k_BHPD.flatten(1, 2), v_BHPD.flatten(1, 2), masks


class CrossSpatialAttention(nn.Module):
    """Attention among an expert's positions; queries, keys and values come by task attention."""

    def __init__(self, spec: NetworkSpec, *, index: int) -> None:
        super().__init__()
        self.heads = spec.experts[index].heads
        self.query, self.key, self.value = (
            TaskAttention(
                sources=spec.source_heads(index),
                heads=self.heads,
                reads=spec.head_width,
                writes=spec.head_width,
            )
            for _ in range(3)
        )
        self.out = nn.Linear(spec.width_of(index), spec.width_of(index))
        start_linear(self.out)

    def forward(self, normed: Sequence[Tensor], *, queries: int | None = None) -> Tensor:
        """Attend from the features [B, P, channels] of all experts, this one last: [B, Q, C]."""
        q = self._heads(self.query([one_BPC[:, :queries] for one_BPC in normed]))
        k, v = self._heads(self.key(normed)), self._heads(self.value(normed))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x_BPC: Tensor) -> Tensor:
        return x_BPC.view(*x_BPC.shape[:2], self.heads, -1).transpose(1, 2)


def attention_by_group(network: Network, images_BCHW: Tensor) -> Tensor:
    """Measure the newest expert's attention in its patch blocks: [B, 4, 2], by GROUPS.

    The first figure is the group's share of all attention, the second the mean of its pairs. The
    network has spatial-task attention.
    """
    kept: list[tuple[Tensor, dict[Group, Tensor]]] = []

    def keep(attention: nn.Module, read: tuple[Sequence[Tensor]]) -> None:
        assert isinstance(attention, SpatialTaskAttention)
        kept.append(attention.groups(read[0]))

    blocks = [network.newest.patch_block(layer) for layer in range(network.spec.depth)]
    hooks = [block.attention.register_forward_pre_hook(keep) for block in blocks]
    try:
        with torch.no_grad():
            network.token_slices(images_BCHW)
    finally:
        for hook in hooks:
            hook.remove()
    whole_B = torch.stack([attention.sum(dim=(1, 2)) for attention, _ in kept]).sum(dim=0)
    groups = []
    for name in GROUPS:
        inside_BLN = torch.stack([attention[:, masks[name]] for attention, masks in kept], dim=1)
        share_B = inside_BLN.sum(dim=(1, 2)) / whole_B
        groups.append(torch.stack((share_B, inside_BLN.mean(dim=(1, 2))), dim=-1))
    return torch.stack(groups, dim=1)
