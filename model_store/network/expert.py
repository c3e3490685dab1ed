"""Define an expert: a narrow transformer that reads all older experts through task attention.

An expert never reads a younger one, so its features are final once it is frozen. Shapes: as in
`layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.network.backbone import (
    BackboneAttention,
    PoolingAttention,
    Rotary,
    activate,
    standardise,
)
from model_store.network.gated import GatedAttention
from model_store.network.layers import SpatialAttention, TaskAttention, start_linear
from model_store.spec import PLAIN, Convolution, NetworkSpec

POSITION_STD = 0.5  # of the order of an embedded patch: position counts from the first step
TOKEN_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """The features of a block that younger experts read, of one expert or several side by side."""

    normed: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(BlockActivations):
    """Block activations together with the output of the block."""

    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenContext:
    """The features of all older experts for a batch of images, as input of a younger expert.

    The last block's activations are of the token alone. `token_BC` joins the experts' slices.
    """

    blocks: tuple[BlockActivations, ...]
    token_BC: Tensor


class Block(nn.Module):
    """Spatial attention inside the expert, then two linear layers across all experts so far.

    Layer `depth` is the class-attention block, whose attention is always plain.
    """

    def __init__(self, spec: NetworkSpec, *, index: int, layer: int) -> None:
        super().__init__()
        width, expert = spec.width_of(index), spec.experts[index]
        kind = PLAIN if index else spec.first
        self.activation = kind.activation
        self.hidden_norm = kind.hidden_norm
        self.eps = spec.layer_norm_eps
        # Only for the mean of the patches does the last block compute every row.
        self.all_rows = kind.pools_patches and layer == spec.depth - 1
        self.shown = 1 if self.all_rows else spec.positions
        """The first rows, which younger experts read: not those of registers."""
        self.norm1 = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        self.attention: nn.Module = _attention(spec, index=index, layer=layer)
        self.norm2 = nn.LayerNorm(width, eps=spec.layer_norm_eps)
        # A linear layer reads this expert alone, and every other module a list of all experts.
        self.widen: nn.Module
        self.narrow: nn.Module
        if index == 0:
            gated = 2 if kind.activation == "swiglu" else 1
            self.widen = nn.Linear(width, gated * width * spec.mlp_ratio)
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
        if isinstance(self.attention, GatedAttention):
            self.attention.start_values()

    def attend(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        """Compute the first half of the block, for all positions or only the first `queries`."""
        if isinstance(self.attention, PoolingAttention):  # the first row is the query
            return self.attention.pool(x_BPC[:, :1], self.norm1(x_BPC[:, 1:]))
        rows = None if self.all_rows else queries
        read: Tensor = self.attention(self.norm1(x_BPC), queries=rows)
        return x_BPC[:, :rows] + read

    def mix(self, s_BPC: Tensor, older: Sequence[BlockActivations]) -> Mixed:
        """Compute the second half of the block from the older experts' activations in it."""
        normed = self.norm2(s_BPC)
        widened = _read(self.widen, [*(one.normed for one in older), normed])
        hidden = standardise(
            activate(widened, self.activation), channels=self.hidden_norm, eps=self.eps
        )
        out = s_BPC + _read(self.narrow, [*(one.hidden for one in older), hidden])
        return Mixed(normed=normed[:, : self.shown], hidden=hidden[:, : self.shown], out=out)


def _attention(spec: NetworkSpec, *, index: int, layer: int) -> SpatialAttention:
    width, heads = spec.width_of(index), spec.experts[index].attention_heads
    if index == 0 and spec.first.pooling == "attention" and layer == spec.depth:
        return PoolingAttention(width=width, heads=heads, bias=spec.qkv_bias)
    if index == 0 and (spec.first.rotary or spec.first.qk_norm):
        return BackboneAttention(
            width=width,
            heads=heads,
            bias=spec.qkv_bias,
            qk_norm=spec.first.qk_norm,
            eps=spec.layer_norm_eps,
        )
    if spec.attention == "plain" or layer == spec.depth:
        return SpatialAttention(width=width, heads=heads, bias=spec.qkv_bias)
    return GatedAttention(width=width, heads=heads, bias=spec.qkv_bias)


def _read(layer: nn.Module, sources: list[Tensor]) -> Tensor:
    # The first expert is an ordinary transformer and reads no other expert.
    read: Tensor = layer(sources[-1] if isinstance(layer, nn.Linear) else sources)
    return read


def _convolution(shape: Convolution) -> nn.Conv2d:
    return nn.Conv2d(
        shape.reads, shape.writes, shape.side, stride=shape.stride, padding=shape.padding
    )


def _rotary(spec: NetworkSpec) -> Rotary:
    turned = spec.width_of(0) // spec.experts[0].attention_heads // 2
    return Rotary(patches=spec.patches, turned=turned, before=1, after=spec.first.registers)


class Expert(nn.Module):
    """The parameters added for one task."""

    def __init__(self, spec: NetworkSpec, *, index: int) -> None:
        super().__init__()
        width, kind = spec.width_of(index), PLAIN if index else spec.first
        *stem, embedding = (_convolution(one) for one in spec.convolutions(width))
        self.stem = nn.ModuleList(stem)
        self.patch_embed = embedding
        self.position = nn.Parameter(torch.empty(spec.positions_of(index), width))
        self.token = nn.Parameter(torch.empty(width))
        self.blocks = nn.ModuleList(
            self.make_block(spec, index=index, layer=layer) for layer in range(spec.depth)
        )
        self.token_in_sequence = spec.token == "in-sequence"
        if not self.token_in_sequence:
            self.class_block = self.make_block(spec, index=index, layer=spec.depth)
        self.registers = kind.registers
        self.pooling = kind.pooling
        self.pre_norm: nn.Module = (
            nn.LayerNorm(width, eps=spec.layer_norm_eps) if kind.pre_norm else nn.Identity()
        )
        if kind.rotary:
            self.rotary = _rotary(spec)
            for module in self.modules():
                if isinstance(module, BackboneAttention):
                    module.turn_by(self.rotary)
        self.norm: nn.Module = (
            nn.Identity()
            if kind.pooling == "attention"
            else nn.LayerNorm(width, eps=spec.layer_norm_eps)
        )
        self._learns_from: int | None = None
        nn.init.xavier_uniform_(self.patch_embed.weight.data.flatten(1))
        for convolution in (*stem, embedding) if stem else ():
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.constant_(convolution.get_parameter("bias"), 0.0)
        nn.init.trunc_normal_(self.position, std=POSITION_STD)
        nn.init.trunc_normal_(self.token, std=TOKEN_STD)

    def make_block(self, spec: NetworkSpec, *, index: int, layer: int) -> Block:
        """Make the block of a layer; the class-attention block comes after all patch blocks."""
        return Block(spec, index=index, layer=layer)

    def embed(self, images_BCHW: Tensor) -> Tensor:
        """Embed the patches and add their positions. A token in the sequence comes first, and
        registers come last: their rows of `position` are all that they are."""
        features_BCHW = images_BCHW
        for convolution in self.stem:
            features_BCHW = F.relu(convolution(features_BCHW))
        grid: Tensor = self.patch_embed(features_BCHW)
        patches_BPC = grid.flatten(2).transpose(1, 2)
        rows = self.with_token(patches_BPC) if self.token_in_sequence else patches_BPC
        if self.registers:
            rows = F.pad(rows, (0, 0, 0, self.registers))
        embedded: Tensor = self.pre_norm(rows + self.position)
        return embedded

    def pool(self, rows_BPC: Tensor) -> Tensor:
        """Return the expert's slice of the token, [B, C], from the rows of its last block; [B, 2·C]
        with the mean of the patches beside it."""
        patches = slice(1, rows_BPC.shape[1] - self.registers)
        if self.pooling == "mean":
            pooled: Tensor = self.norm(rows_BPC[:, patches].mean(dim=1))
        elif self.pooling == "token-and-mean":
            normed_BPC: Tensor = self.norm(rows_BPC)
            pooled = torch.cat((normed_BPC[:, 0], normed_BPC[:, patches].mean(dim=1)), dim=-1)
        else:
            pooled = self.norm(rows_BPC.squeeze(1))
        return pooled

    def patch_block(self, layer: int) -> Block:
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    @property
    def last_block(self) -> Block:
        """Return the last block that changes the token."""
        return self.patch_block(-1) if self.token_in_sequence else self.class_block

    def with_token(self, patches_BPC: Tensor) -> Tensor:
        """Put the expert's token before the patches."""
        token_B1C = self.token.expand(len(patches_BPC), 1, -1)
        return torch.cat((token_B1C, patches_BPC), dim=1)

    def freeze(self) -> None:
        """Make the expert a constant: no gradients, evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def fix(self, *, but_last: int = 0) -> None:
        """Freeze pre-trained weights. The last `but_last` blocks, if any, and the norm learn."""
        self.freeze()
        self._learns_from = len(self.blocks) - but_last
        for parameter in self.learnable():
            parameter.requires_grad_(True)

    def learnable(self) -> list[nn.Parameter]:
        """List the parameters that learning the expert's task may change: all, unless fixed."""
        if self._learns_from is None:
            return list(self.parameters())
        blocks = self.blocks[self._learns_from :]
        after = [] if self.token_in_sequence else [*self.class_block.parameters()]
        return [*blocks.parameters(), *after, *self.norm.parameters()] if len(blocks) else []
