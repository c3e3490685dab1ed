"""One expert: a narrow transformer of its own that reads all older experts through task attention.

Shapes as in `layers.py`. An expert never sees a younger one, so what it computes is final
from the moment it is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.network.layers import SpatialAttention, TaskAttention, start_linear
from model_store.spec import NetworkSpec

POSITION_STD = 0.5  # of the size of an embedded patch: place must be heard from the first step
TOKEN_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What an expert, or several side by side, leave in a block for younger experts to read."""

    normed: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Left):
    """And the block's output."""

    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Older:
    """All that a younger expert needs of the older ones, for the same images: what they left in
    each block, the last for the token alone, and their slices of the token, [B, C of all]."""

    blocks: tuple[Left, ...]
    token_BC: Tensor


class Block(nn.Module):
    """Spatial attention inside the expert, then two linear layers that read all experts so far."""

    def __init__(self, spec: NetworkSpec, *, index: int) -> None:
        super().__init__()
        width, expert = spec.width_of(index), spec.tasks[index].expert
        self.norm1 = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.attention = SpatialAttention(
            width=width, heads=expert.attention_heads, bias=spec.qkv_bias
        )
        self.norm2 = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.widen: nn.Linear | TaskAttention
        self.narrow: nn.Linear | TaskAttention
        if index == 0:
            self.widen = nn.Linear(width, width * spec.mlp_ratio)
            self.narrow = nn.Linear(width * spec.mlp_ratio, width)
        else:
            sources = spec.source_heads(index)
            narrow, wide = spec.head_width, spec.hidden_width
            self.widen = TaskAttention(
                sources=sources, heads=expert.heads, reads=narrow, writes=wide
            )
            self.narrow = TaskAttention(
                sources=sources, heads=expert.heads, reads=wide, writes=narrow
            )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                start_linear(module)

    def attend(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        """The block's first half, for all positions or for the first few, which read all."""
        read: Tensor = self.attention(self.norm1(x_BPC), queries=queries)
        return x_BPC[:, :queries] + read

    def mix(self, s_BPC: Tensor, older: Sequence[Left]) -> Mixed:
        """The block's second half; `older` is what the older experts' `mix` gave in this block."""
        normed = self.norm2(s_BPC)
        hidden = F.gelu(_read(self.widen, [*(one.normed for one in older), normed]))
        out = s_BPC + _read(self.narrow, [*(one.hidden for one in older), hidden])
        return Mixed(normed=normed, hidden=hidden, out=out)


def _read(layer: nn.Linear | TaskAttention, sources: list[Tensor]) -> Tensor:
    # The first expert is an ordinary transformer: it has nobody to read but itself.
    read: Tensor = layer(sources[-1] if isinstance(layer, nn.Linear) else sources)
    return read


class Expert(nn.Module):
    """The parameters added for one task."""

    def __init__(self, spec: NetworkSpec, *, index: int) -> None:
        super().__init__()
        width = spec.width_of(index)
        self.patch_embed = nn.Conv2d(3, width, spec.patch_size, stride=spec.patch_size)
        self.position = nn.Parameter(torch.empty(spec.positions, width))
        self.token = nn.Parameter(torch.empty(width))
        self.blocks = nn.ModuleList(Block(spec, index=index) for _ in range(spec.depth))
        self.token_in_sequence = spec.token == "in-sequence"
        if not self.token_in_sequence:
            self.class_block = Block(spec, index=index)
        self.norm = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self._learns_from: int | None = None
        nn.init.xavier_uniform_(self.patch_embed.weight.data.flatten(1))
        nn.init.trunc_normal_(self.position, std=POSITION_STD)
        nn.init.trunc_normal_(self.token, std=TOKEN_STD)

    def embed(self, images_BCHW: Tensor) -> Tensor:
        """What the patch blocks start from; a token in the sequence comes first."""
        grid: Tensor = self.patch_embed(images_BCHW)
        patches_BPC = grid.flatten(2).transpose(1, 2)
        if self.token_in_sequence:
            return self.with_token(patches_BPC) + self.position
        return patches_BPC + self.position

    def patch_block(self, layer: int) -> Block:
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    @property
    def last_block(self) -> Block:
        """The block that makes the token's last step."""
        return self.patch_block(-1) if self.token_in_sequence else self.class_block

    def with_token(self, patches_BPC: Tensor) -> Tensor:
        """The patches after the expert's token."""
        token_B1C = self.token.expand(len(patches_BPC), 1, -1)
        return torch.cat((token_B1C, patches_BPC), dim=1)

    def freeze(self) -> None:
        """From now on a constant: no gradients, evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def fix(self, *, but_last: int = 0) -> None:
        """For weights that were learnt elsewhere: learning changes the last few blocks at most."""
        self.freeze()
        self._learns_from = len(self.blocks) - but_last
        for parameter in self.learnable():
            parameter.requires_grad_(True)

    def learnable(self) -> list[nn.Parameter]:
        """What learning the expert's own task may change: everything, unless it was fixed."""
        if self._learns_from is None:
            return list(self.parameters())
        blocks = self.blocks[self._learns_from :]
        return [*blocks.parameters(), *self.norm.parameters()] if len(blocks) else []
