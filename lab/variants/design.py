"""Choose the parts of a variant, and make its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor, nn

from lab.backbones import geometry
from lab.presets import Preset
from lab.variants.alone import qkv_heads
from lab.variants.drop_path import DropPath
from lab.variants.mixing import Matrices, mixing_layer
from lab.variants.spatial import CrossSpatialAttention, SpatialTask, SpatialTaskAttention
from model_store.errors import WrongUsage
from model_store.network.expert import Block, BlockActivations, Expert, Mixed
from model_store.network.layers import start_linear
from model_store.network.network import Network
from model_store.spec import Attention, NetworkSpec

NetworkName = Literal[
    "dne", "independent",
    "sta-ia", "sta-spdh", "sta-dpdh", "sta-both",
    "dense-s", "dense-f", "sss", "ffs", "fff",
    "mhsa", "mhsa-mlp", "fc1", "fc2",
    "depth-0", "depth-1", "depth-2", "depth-3", "depth-4", "depth-5", "depth-6",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The parts of a network. The defaults are the product's.

    The first expert reads no other one and is the same in all designs, but for `attention`.
    """

    attention: Attention = "gated"
    drop_path: float = 0.0
    matrices: Matrices = "ssf"
    widen: bool = True
    """Read across tasks in the first linear layer of a block (the paper's FC1)."""
    narrow: bool = True
    """Read across tasks in the second linear layer (FC2)."""
    mhsa: bool = False
    """Read across tasks in the layers that make queries, keys and values."""
    spatial: SpatialTask | None = None
    """Attend across tasks, heads and positions in one softmax."""
    layers: int | None = None
    """Read across tasks in the first so many blocks of an expert; None: in all."""

    def __post_init__(self) -> None:
        if self.attention == "gated" and (self.mhsa or self.spatial):
            raise WrongUsage("gated attention reads one expert alone: choose attention=plain")

    @property
    def folds(self) -> bool:
        """Return whether the product's folded form computes the same."""
        return replace(self, drop_path=0.0) == Design(attention=self.attention)

    @property
    def base(self) -> str:
        """Name the first expert's kind: designs of equal `base` begin with the same one."""
        dropped = f", drop-path {self.drop_path}" if self.drop_path else ""
        return ("gated transformer" if self.attention == "gated" else "transformer") + dropped


ALONE = Design(widen=False, narrow=False)
PLAIN_ALONE = replace(ALONE, attention="plain")
NETWORKS: Mapping[NetworkName, Design] = {
    "dne": Design(),
    "independent": ALONE,
    "sta-ia": replace(PLAIN_ALONE, spatial="ia"),
    "sta-spdh": replace(PLAIN_ALONE, spatial="spdh"),
    "sta-dpdh": replace(PLAIN_ALONE, spatial="dpdh"),
    "sta-both": replace(PLAIN_ALONE, spatial="both"),
    "dense-s": Design(matrices="1s"),
    "dense-f": Design(matrices="1f"),
    "sss": Design(matrices="sss"),
    "ffs": Design(matrices="ffs"),
    "fff": Design(matrices="fff"),
    "mhsa": replace(PLAIN_ALONE, mhsa=True),
    "mhsa-mlp": Design(mhsa=True, attention="plain"),
    "fc1": Design(narrow=False),
    "fc2": Design(widen=False),
    "depth-0": Design(layers=0),
    "depth-1": Design(layers=1),
    "depth-2": Design(layers=2),
    "depth-3": Design(layers=3),
    "depth-4": Design(layers=4),
    "depth-5": Design(layers=5),
    "depth-6": Design(layers=6),
}


class VariantBlock(Block):
    """A block of a design."""

    def __init__(self, spec: NetworkSpec, *, index: int, layer: int, design: Design) -> None:
        super().__init__(spec, index=index, layer=layer)
        self.drop_path = DropPath(design.drop_path) if design.drop_path else nn.Identity()
        self.attention = _attention(design, spec, index=index) or self.attention
        if index > 0:
            crosses = design.layers is None or layer < design.layers
            mixing = partial(_mixing, design.matrices, spec, index=index)
            narrow, wide = spec.head_width, spec.hidden_width
            widen = mixing(reads=narrow, writes=wide, crosses=crosses and design.widen)
            narrowing = mixing(reads=wide, writes=narrow, crosses=crosses and design.narrow)
            self.widen, self.narrow = widen or self.widen, narrowing or self.narrow

    def attend(
        self,
        x_BPC: Tensor,
        *,
        queries: int | None = None,
        sources: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute the first half of the block, from this expert alone or from all `sources`."""
        read = self.norm1(x_BPC) if sources is None else sources
        rows = None if self.all_rows else queries
        attended: Tensor = self.drop_path(self.attention(read, queries=rows))
        return x_BPC[:, :rows] + attended

    def mix(self, s_BPC: Tensor, older: Sequence[BlockActivations]) -> Mixed:
        mixed = super().mix(s_BPC, older)
        if isinstance(self.drop_path, nn.Identity) or not self.training:
            return mixed  # the same bits as in the product
        out = s_BPC + self.drop_path(mixed.out - s_BPC)
        return Mixed(normed=mixed.normed, hidden=mixed.hidden, out=out)


def _attention(design: Design, spec: NetworkSpec, *, index: int) -> nn.Module | None:
    """Make the spatial attention of a block; None: the product's."""
    if index == 0:
        return None
    if design.spatial is not None:
        width, heads = spec.width_of(index), spec.experts[index].attention_heads
        return SpatialTaskAttention(
            width=width, heads=heads, bias=spec.qkv_bias, kind=design.spatial
        )
    return CrossSpatialAttention(spec, index=index) if design.mhsa else None


def _mixing(
    matrices: Matrices, spec: NetworkSpec, *, index: int, reads: int, writes: int, crosses: bool
) -> nn.Module | None:
    """Make a linear layer of a later expert's block; None: the product's task attention."""
    heads = spec.experts[index].heads
    if not crosses:
        alone = nn.Linear(heads * reads, heads * writes)
        start_linear(alone)
        return alone
    if matrices == "ssf":
        return None
    sources = spec.source_heads(index)
    return mixing_layer(matrices, sources=sources, heads=heads, reads=reads, writes=writes)


class VariantNetwork(Network):
    """A network of a design."""

    design: ClassVar[Design]

    def attend_all(
        self, blocks: Sequence[Block], states: Sequence[Tensor], *, queries: int | None = None
    ) -> list[Tensor]:
        design = self.design
        if len(blocks) == 1 or not (design.mhsa or design.spatial):
            return super().attend_all(blocks, states, queries=queries)
        source = qkv_heads if design.spatial else _normed
        sources = [source(block, x_BPC) for block, x_BPC in zip(blocks, states, strict=True)]
        attended = [blocks[0].attend(states[0], queries=queries)]
        for index, (block, x_BPC) in enumerate(zip(blocks, states, strict=True)):
            if index > 0:
                assert isinstance(block, VariantBlock)
                read = sources[: index + 1]
                attended.append(block.attend(x_BPC, queries=queries, sources=read))
        return attended


def _normed(block: Block, x_BPC: Tensor) -> Tensor:
    normed: Tensor = block.norm1(x_BPC)
    return normed


def network_type(design: Design) -> type[Network]:
    """Make the class of a design's networks: the product's own where nothing differs."""
    if design == Design(attention=design.attention):
        return Network

    class DesignedExpert(Expert):
        def make_block(self, spec: NetworkSpec, *, index: int, layer: int) -> Block:
            return VariantBlock(spec, index=index, layer=layer, design=design)

    parts = {"design": design, "expert_type": DesignedExpert}
    return type("DesignedNetwork", (VariantNetwork,), parts)


def make_network(design: Design, preset: Preset) -> Network:
    """Make the network of a design in the sizes of a preset, before its first task."""
    return network_type(design)(geometry(preset, design.attention))
