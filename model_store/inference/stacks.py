"""Keep folded experts of equal shape side by side in memory, with room for more.

A stage of a block is then a few products for all of them. A younger expert is written next to the
older ones, and versions that use the first few experts of a stack do not notice. If there is no
room, the stack takes new memory and counts a relocation.

Layout of one block, for 2 older heads (`before`), 3 experts of 1 head, D = 8, E = 16. Expert e is
head 2 + e of the lineage and reads the heads 0 to 2 + e::

    equal shape   one tensor a name       [3, …]           query-key, norms, attention
    widen[e]      one matrix a reader     [H·8 + H, 16]    H = 3, 4, 5 heads; last H rows: biases
    narrow[h]     one matrix a source     [16, 8·readers]  the experts that read head h
    narrow bias   one tensor              [5, 3, 8]        source, reader, channel

    narrow[0]  |  e=0  |  e=1  |  e=2  | room …
    narrow[1]  |  e=0  |  e=1  |  e=2  | room …
    narrow[2]  |  e=0  |  e=1  |  e=2  | room …    head 2 is of expert 0
    narrow[3]          |  e=1  |  e=2  | room …    head 3 is of expert 1
    narrow[4]                  |  e=2  | room …    head 4 is of expert 2

Shapes: as in `fold.py`, S experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_store.inference.attention import StackedAttention, StackedPlaces, Turn
from model_store.inference.fold import (
    FoldedAttention,
    FoldedBlock,
    FoldedEdges,
    FoldedExpert,
    FoldedTaskAttention,
    named_tensors,
)
from model_store.spec import NetworkSpec

GROWING = ("value_HDE", "value_bias_HE")
"""Tensors of a block whose size grows with the heads that an expert reads."""


class BlockStack:
    """One block of every expert in a stack.

    `widen` has a matrix for each reader, [H·D + H, E]: a reader scales its sources and multiplies
    once. `narrow` has a matrix for each source, [E, D · readers]: a source is multiplied once for
    all its readers.
    """

    def __init__(self, *, before: int, heads: int) -> None:
        self._before = before
        self._heads = heads
        self._capacity = 0
        self.relocations = 0
        self._equal: dict[str, Tensor] = {}
        self._narrow_bias = torch.empty(0, 0, 0)
        self.widen: list[Tensor] = []
        self.narrow: list[Tensor] = []

    def write(self, slot: int, block: FoldedBlock, *, room: int) -> None:
        """Put an expert's block next to the others. A full stack grows by this expert and `room`
        more."""
        if not self._equal:
            self._begin(block)
        if slot == self._capacity:
            self._resize(slot + 1 + room)
        for name, tensor in _of_equal_shape(block).items():
            self._equal[name][slot] = tensor
        widen = _task_attention(block.widen)
        self.widen[slot:] = [torch.cat((widen.value_HDE.flatten(0, 1), widen.value_bias_HE))]
        self._write_narrow(slot, _task_attention(block.narrow))

    def _write_narrow(self, slot: int, narrow: FoldedTaskAttention) -> None:
        sources, reads, writes = narrow.value_HDE.shape
        self._narrow_bias[:sources, slot] = narrow.value_bias_HE
        del self.narrow[sources:]  # of an expert that was not finished
        for source in range(len(self.narrow), sources):
            readers = self._capacity - self.first_reader(source)
            self.narrow.append(narrow.value_HDE.new_empty(reads, readers * writes))
        for source, value_DE in enumerate(narrow.value_HDE):
            column = (slot - self.first_reader(source)) * writes
            self.narrow[source][:, column : column + writes] = value_DE

    def _begin(self, like: FoldedBlock) -> None:
        """Create empty tensors of the shapes of this block."""
        for name, tensor in _of_equal_shape(like).items():
            self._equal[name] = tensor.new_empty(0, *tensor.shape)
        bias_HE = _task_attention(like.narrow).value_bias_HE
        self._narrow_bias = bias_HE.new_empty(0, 0, bias_HE.shape[1])

    def _resize(self, capacity: int) -> None:
        self.relocations += 1
        for name, old in self._equal.items():
            self._equal[name] = _resized(old, (capacity, *old.shape[1:]))
        sources, width = self._before + self._heads * capacity, self._narrow_bias.shape[2]
        self._narrow_bias = _resized(self._narrow_bias, (sources, capacity, width))
        for source, old in enumerate(self.narrow):
            readers = capacity - self.first_reader(source)
            self.narrow[source] = _resized(old, (len(old), readers * width))
        self._capacity = capacity

    def truncate(self, count: int, *, room: int) -> None:
        """Keep the first `count` experts and room for at most `room` more."""
        del self.widen[count:]
        del self.narrow[self._before + self._heads * count :]
        if count + room >= self._capacity:
            return
        self._resize(count + room)

    def first_reader(self, source: int) -> int:
        """Find the oldest expert of this stack that reads a source head."""
        return max(0, source - self._before) // self._heads

    def equal(self, name: str, count: int) -> Tensor:
        """Give the tensors of this name of the first `count` experts: [count, …]."""
        return self._equal[name][:count]

    def attention(self, count: int, *, heads: int) -> StackedAttention:
        return StackedAttention(
            heads=heads,
            qkv_SCX=self.equal("attention.qkv_CX", count),
            query_bias_SC=self.equal("attention.query_bias_C", count),
            out_SCC=self.equal("attention.out_CC", count),
            out_bias_SC=self.equal("attention.out_bias_C", count),
            places=self._places(count),
        )

    def _places(self, count: int) -> StackedPlaces | None:
        if "attention.places.content_H" not in self._equal:
            return None
        return StackedPlaces(
            weights_SHPP=self.equal("attention.places.weights_HPP", count),
            content_SH=self.equal("attention.places.content_H", count),
        )

    def narrow_bias(self, count: int) -> Tensor:
        """Give the value biases [S, H, D], with zeros for sources that an expert does not read."""
        sources = self._before + self._heads * count
        return self._narrow_bias[:sources, :count].transpose(0, 1)

    def tensors(self) -> list[Tensor]:
        return [*self._equal.values(), self._narrow_bias, *self.widen, *self.narrow]


class Stack:
    """Neighbouring experts of equal shape in a lineage, after `before` older heads."""

    def __init__(self, *, before: int, heads: int, attention_heads: int, blocks: int) -> None:
        self.before = before
        self.heads = heads
        self.attention_heads = attention_heads
        self.count = 0
        self.blocks = tuple(BlockStack(before=before, heads=heads) for _ in range(blocks))
        self._edges: dict[str, Tensor] = {}
        self._edge_relocations = 0

    def fits(self, heads: int, attention_heads: int) -> bool:
        return (heads, attention_heads) == (self.heads, self.attention_heads)

    def append(self, expert: FoldedExpert) -> None:
        for _ in self.appending(expert.edges, expert.blocks, room=0):
            pass

    def appending(
        self, edges: FoldedEdges, blocks: Iterable[FoldedBlock], *, room: int
    ) -> Iterator[None]:
        """Write an expert next to the others, one block a step.

        The expert counts after the last step. The next expert overwrites an unfinished one.
        """
        slot = self.count
        for stack, block in zip(self.blocks, blocks, strict=True):
            stack.write(slot, block, room=room)
            yield
        for name, tensor in named_tensors(edges):
            old = self._edges.get(name, tensor.new_empty(0, *tensor.shape))
            if slot == len(old):
                old = _resized(old, (slot + 1 + room, *tensor.shape))
                self._edge_relocations += 1
            old[slot] = tensor
            self._edges[name] = old
        self.count = slot + 1
        yield

    def truncating(self, count: int, *, room: int) -> Iterator[None]:
        """Keep the first `count` experts and room for at most `room` more, one block a step.

        The other experts do not count from the first step on.
        """
        self.count = count
        for block in self.blocks:
            block.truncate(count, room=room)
            yield
        for name, old in self._edges.items():
            if len(old) > count + room:
                self._edges[name] = _resized(old, (count + room, *old.shape[1:]))
                self._edge_relocations += 1

    def edge(self, name: str, count: int) -> Tensor:
        return self._edges[name][:count]

    @property
    def relocations(self) -> int:
        """Count how often experts took new memory. Addresses are valid while this number stays."""
        return self._edge_relocations + sum(block.relocations for block in self.blocks)

    @property
    def bytes(self) -> int:
        """Count the bytes of all experts and of the room for more."""
        tensors = [
            *self._edges.values(),
            *(one for block in self.blocks for one in block.tensors()),
        ]
        return sum(tensor.nbytes for tensor in tensors)


class RunWeights(Protocol):
    """The weights of S experts of equal shape whose positions attend in the same products."""

    def attention(self, layer: int) -> StackedAttention: ...

    def edge(self, name: str) -> Tensor:
        """Give the tensors of this path in `FoldedEdges`, such as `stem.0.bias_O`: [S, …]."""

    @property
    def has_norm(self) -> bool:
        """Tell if slices are normalised at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class First:
    """The first expert, an ordinary transformer: a run of one."""

    expert: FoldedExpert

    def attention(self, layer: int) -> StackedAttention:
        folded = self.expert.blocks[layer].attention
        places = folded.places
        return StackedAttention(
            heads=self.expert.attention_heads,
            qkv_SCX=folded.qkv_CX[None],
            query_bias_SC=folded.query_bias_C[None],
            out_SCC=folded.out_CC[None],
            out_bias_SC=folded.out_bias_C[None],
            places=None
            if places is None
            else StackedPlaces(
                weights_SHPP=places.weights_HPP[None], content_SH=places.content_H[None]
            ),
            turn=self._turn(folded),
        )

    def _turn(self, folded: FoldedAttention) -> Turn | None:
        backbone = self.expert.edges.backbone
        if backbone is None or folded.turned is None:
            return None
        turned = folded.turned
        return Turn(key_bias_C=turned.key_bias_C, norms=turned.norms, turns=backbone.turns)

    def edge(self, name: str) -> Tensor:
        return dict(named_tensors(self.expert.edges))[name][None]

    @property
    def has_norm(self) -> bool:
        return self.expert.edges.norm_weight_C is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The first `count` experts of a stack: those that one version uses."""

    stack: Stack
    count: int

    @property
    def begin(self) -> int:
        """Give the place of the part's first head among all heads of the lineage."""
        return self.stack.before

    @property
    def end(self) -> int:
        return self.begin + self.count * self.stack.heads

    def attention(self, layer: int) -> StackedAttention:
        return self.stack.blocks[layer].attention(self.count, heads=self.stack.attention_heads)

    def edge(self, name: str) -> Tensor:
        return self.stack.edge(name, self.count)

    @property
    def has_norm(self) -> bool:
        return True


def stack_up(spec: NetworkSpec, experts: Sequence[FoldedExpert]) -> tuple[Part, ...]:
    """Put the experts of a lineage after its first into stacks of their own, one for each run."""
    parts = []
    for run in spec.runs()[1:]:
        stack = Stack(
            before=run.before,
            heads=run.heads,
            attention_heads=run.attention_heads,
            blocks=len(spec.blocks),
        )
        for index in run.experts:
            stack.append(experts[index])
        parts.append(Part(stack=stack, count=stack.count))
    return tuple(parts)


def _of_equal_shape(block: FoldedBlock) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in named_tensors(block)
        if name.rpartition(".")[2] not in GROWING
    }


def _task_attention(layer: object) -> FoldedTaskAttention:
    if not isinstance(layer, FoldedTaskAttention):
        raise TypeError("the first expert of a lineage has no task attention to stack")
    return layer


def _resized(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Copy a tensor into new memory of this shape: cut off, or filled up with zeros."""
    new = old.new_zeros(shape)
    kept = tuple(slice(min(sizes)) for sizes in zip(old.shape, shape, strict=True))
    new[kept] = old[kept]
    return new
