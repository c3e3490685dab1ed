"""A lineage as runs of experts that are computed together: the first expert, then stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_store.inference.fold import FoldedExpert
from model_store.inference.stack import Attention, Stack


class Run(Protocol):
    """S experts of equal shape whose positions attend in the same products."""

    def attention(self, layer: int) -> Attention: ...

    def edge(self, name: str) -> Tensor:
        """What the experts have under this name in `FoldedEdges`: [S, …]."""


@dataclass(frozen=True, slots=True, eq=False)
class First:
    """The first expert, an ordinary transformer: a run of one."""

    expert: FoldedExpert

    def attention(self, layer: int) -> Attention:
        folded = self.expert.blocks[layer].attention
        return Attention(
            heads=self.expert.attention_heads,
            qkv_SCX=folded.qkv_CX[None],
            query_bias_SC=folded.query_bias_C[None],
            out_SCC=folded.out_CC[None],
            out_bias_SC=folded.out_bias_C[None],
        )

    def edge(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self.expert.edges, name)
        return tensor[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The first `count` experts of a stack."""

    stack: Stack
    count: int

    @property
    def begin(self) -> int:
        """The place of its first head among all heads of the lineage."""
        return self.stack.before

    @property
    def end(self) -> int:
        return self.begin + self.count * self.stack.heads

    def attention(self, layer: int) -> Attention:
        return self.stack.blocks[layer].attention(self.count, heads=self.stack.attention_heads)

    def edge(self, name: str) -> Tensor:
        return self.stack.edge(name, self.count)


def stack_up(experts: Sequence[FoldedExpert]) -> tuple[Part, ...]:
    """The experts of a lineage after its first, in stacks of their own."""
    stacks: list[Stack] = []
    before = experts[0].heads
    for expert in experts[1:]:
        if not stacks or not stacks[-1].fits(expert.heads, expert.attention_heads):
            stacks.append(
                Stack(
                    before=before,
                    heads=expert.heads,
                    attention_heads=expert.attention_heads,
                    blocks=len(expert.blocks),
                )
            )
        stacks[-1].append(expert)
        before += expert.heads
    return tuple(Part(stack=stack, count=stack.count) for stack in stacks)
