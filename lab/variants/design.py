"""Choose the parts of a variant, and make its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from lab.variants.drop_path import DropPath
from lab.variants.gated import GatedAttention
from model_store.network.expert import Block, BlockActivations, Expert, Mixed
from model_store.network.network import Network
from model_store.spec import NetworkSpec

NetworkName = Literal["dne"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The parts of a network. The defaults are the product's."""

    gated: bool = False
    """Gated positional attention in the patch blocks, and no bias of queries, keys and values."""
    drop_path: float = 0.0

    @property
    def folds(self) -> bool:
        """Tell whether the product's folded form computes the same."""
        return replace(self, drop_path=0.0) == Design()

    @property
    def base(self) -> str:
        """Name the first expert's kind: designs of equal `base` begin with the same one."""
        dropped = f", drop-path {self.drop_path}" if self.drop_path else ""
        return ("gated transformer" if self.gated else "transformer") + dropped


class VariantBlock(Block):
    """A block of a design. Layer `depth` is the class-attention block."""

    def __init__(self, spec: NetworkSpec, *, index: int, layer: int, design: Design) -> None:
        super().__init__(spec, index=index)
        self.drop_path = DropPath(design.drop_path) if design.drop_path else nn.Identity()
        if design.gated and layer < spec.depth:
            self.attention = GatedAttention(
                width=spec.width_of(index),
                heads=spec.tasks[index].expert.attention_heads,
                patches=spec.patches,
            )

    def attend(self, x_BPC: Tensor, *, queries: int | None = None) -> Tensor:
        read: Tensor = self.drop_path(self.attention(self.norm1(x_BPC), queries=queries))
        return x_BPC[:, :queries] + read

    def mix(self, s_BPC: Tensor, older: Sequence[BlockActivations]) -> Mixed:
        mixed = super().mix(s_BPC, older)
        if isinstance(self.drop_path, nn.Identity) or not self.training:
            return mixed  # the same bits as in the product
        out = s_BPC + self.drop_path(mixed.out - s_BPC)
        return Mixed(normed=mixed.normed, hidden=mixed.hidden, out=out)


def network_type(design: Design) -> type[Network]:
    """Make the class of a design's networks: the product's own where nothing differs."""
    if design == Design():
        return Network

    class VariantExpert(Expert):
        def make_block(self, spec: NetworkSpec, *, index: int, layer: int) -> Block:
            return VariantBlock(spec, index=index, layer=layer, design=design)

    class VariantNetwork(Network):
        expert_type = VariantExpert

    return VariantNetwork
