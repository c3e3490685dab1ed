"""Folded experts of equal shape side by side in memory, with room for more.

Experts that follow each other in a lineage share a stack, so that a stage of a block is a few
products for all of them. A younger expert is written next to the older ones; whoever uses the
first few experts of a stack is not touched by it.

Shapes: as in `fold.py`, S experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model_store.network.fold import (
    FoldedBlock,
    FoldedEdges,
    FoldedExpert,
    FoldedReading,
    named_tensors,
)

GROWING = ("value_HDE", "value_bias_HE")
"""Tensors of a block that are larger in a younger expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """`FoldedAttention` of S experts."""

    heads: int
    qkv_SCX: Tensor
    query_bias_SC: Tensor
    out_SCC: Tensor
    out_bias_SC: Tensor


class BlockStack:
    """One block of every expert in a stack.

    `widen` is kept by reader, [H·D + H, E] with the value biases in its last rows: a reader
    scales what it reads, and multiplies once. `narrow` is kept by source, [E, D · readers]: a
    source is multiplied once for all its readers.
    """

    def __init__(self, *, before: int, heads: int) -> None:
        self._before = before
        self._heads = heads
        self._capacity = 0
        self._equal: dict[str, Tensor] = {}
        self._narrow_bias = torch.empty(0, 0, 0)
        self.widen: list[Tensor] = []
        self.narrow: list[Tensor] = []

    def write(self, slot: int, block: FoldedBlock, *, room: int) -> None:
        """Puts an expert's block in its place, next to the others. Where there is none, it makes
        room for this expert and `room` more."""
        if slot == self._capacity:
            self._reserve(slot + 1 + room, like=block)
        for name, tensor in _of_equal_shape(block).items():
            self._equal[name][slot] = tensor
        widen = _reading(block.widen)
        self.widen[slot:] = [torch.cat((widen.value_HDE.flatten(0, 1), widen.value_bias_HE))]
        self._write_narrow(slot, _reading(block.narrow))

    def _write_narrow(self, slot: int, narrow: FoldedReading) -> None:
        sources, reads, writes = narrow.value_HDE.shape
        self._narrow_bias[:sources, slot] = narrow.value_bias_HE
        del self.narrow[sources:]  # left by an expert that was not finished
        for source in range(len(self.narrow), sources):
            readers = self._capacity - self.first_reader(source)
            self.narrow.append(narrow.value_HDE.new_empty(reads, readers * writes))
        for source, value_DE in enumerate(narrow.value_HDE):
            column = (slot - self.first_reader(source)) * writes
            self.narrow[source][:, column : column + writes] = value_DE

    def _reserve(self, capacity: int, *, like: FoldedBlock) -> None:
        for name, tensor in _of_equal_shape(like).items():
            old = self._equal.get(name)
            self._equal[name] = roomier(old, (capacity, *tensor.shape), like=tensor)
        bias_HE = _reading(like.narrow).value_bias_HE
        width = bias_HE.shape[1]
        sources = self._before + self._heads * capacity
        self._narrow_bias = roomier(self._narrow_bias, (sources, capacity, width), like=bias_HE)
        for source, old in enumerate(self.narrow):
            readers = capacity - self.first_reader(source)
            self.narrow[source] = roomier(old, (len(old), readers * width), like=old)
        self._capacity = capacity

    def first_reader(self, source: int) -> int:
        """The oldest expert of this stack that reads a source head."""
        return max(0, source - self._before) // self._heads

    def equal(self, name: str, count: int) -> Tensor:
        """What the first `count` experts have under this name."""
        return self._equal[name][:count]

    def attention(self, count: int, *, heads: int) -> Attention:
        return Attention(
            heads=heads,
            qkv_SCX=self.equal("attention.qkv_CX", count),
            query_bias_SC=self.equal("attention.query_bias_C", count),
            out_SCC=self.equal("attention.out_CC", count),
            out_bias_SC=self.equal("attention.out_bias_C", count),
        )

    def narrow_bias(self, count: int) -> Tensor:
        """[S, H, D]; zero for sources that an expert does not read."""
        sources = self._before + self._heads * count
        return self._narrow_bias[:sources, :count].transpose(0, 1)

    def tensors(self) -> list[Tensor]:
        return [*self._equal.values(), self._narrow_bias, *self.widen, *self.narrow]


class Stack:
    """Experts of equal shape that follow each other in a lineage, after `before` older heads."""

    def __init__(self, *, before: int, heads: int, attention_heads: int, blocks: int) -> None:
        self.before = before
        self.heads = heads
        self.attention_heads = attention_heads
        self.count = 0
        self.blocks = tuple(BlockStack(before=before, heads=heads) for _ in range(blocks))
        self._edges: dict[str, Tensor] = {}

    def fits(self, heads: int, attention_heads: int) -> bool:
        return (heads, attention_heads) == (self.heads, self.attention_heads)

    def append(self, expert: FoldedExpert) -> None:
        for _ in self.appending(expert.edges, expert.blocks, room=0):
            pass

    def appending(
        self, edges: FoldedEdges, blocks: Iterable[FoldedBlock], *, room: int
    ) -> Iterator[None]:
        """Writes an expert next to the others, a block a step. It is there after the last one;
        an expert that was not finished is overwritten by the next."""
        slot = self.count
        for stack, block in zip(self.blocks, blocks, strict=True):
            stack.write(slot, block, room=room)
            yield
        for name, tensor in named_tensors(edges):
            old = self._edges.get(name)
            if old is None or slot == len(old):
                self._edges[name] = roomier(old, (slot + 1 + room, *tensor.shape), like=tensor)
            self._edges[name][slot] = tensor
        self.count = slot + 1
        yield

    def edge(self, name: str, count: int) -> Tensor:
        return self._edges[name][:count]

    @property
    def bytes(self) -> int:
        """Memory for experts and room for more."""
        tensors = [
            *self._edges.values(),
            *(one for block in self.blocks for one in block.tensors()),
        ]
        return sum(tensor.nbytes for tensor in tensors)


def _of_equal_shape(block: FoldedBlock) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in named_tensors(block)
        if name.rpartition(".")[2] not in GROWING
    }


def _reading(layer: object) -> FoldedReading:
    if not isinstance(layer, FoldedReading):
        raise TypeError("the first expert of a lineage reads nobody and has no place in a stack")
    return layer


def roomier(old: Tensor | None, shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Zeros of this shape around what was there."""
    new = like.new_zeros(shape)
    if old is not None:
        new[tuple(map(slice, old.shape))] = old
    return new
