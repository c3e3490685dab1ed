"""Folded experts of equal shape side by side in memory, with room for more.

Experts that follow each other in a lineage share a stack, so that a stage of a block is a few
products for all of them. A younger expert is written next to the older ones; whoever uses the
first few experts of a stack is not touched by it. Where there is no room the memory moves, and
`moves` tells those who have kept an address.

Shapes: as in `fold.py`, S experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model_store.inference.fold import (
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
        self.moves = 0
        self._equal: dict[str, Tensor] = {}
        self._narrow_bias = torch.empty(0, 0, 0)
        self.widen: list[Tensor] = []
        self.narrow: list[Tensor] = []

    def write(self, slot: int, block: FoldedBlock, *, room: int) -> None:
        """Puts an expert's block in its place, next to the others. Where there is none, it makes
        room for this expert and `room` more."""
        if not self._equal:
            self._begin(block)
        if slot == self._capacity:
            self._resize(slot + 1 + room)
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

    def _begin(self, like: FoldedBlock) -> None:
        """Room for nobody yet."""
        for name, tensor in _of_equal_shape(like).items():
            self._equal[name] = tensor.new_empty(0, *tensor.shape)
        bias_HE = _reading(like.narrow).value_bias_HE
        self._narrow_bias = bias_HE.new_empty(0, 0, bias_HE.shape[1])

    def _resize(self, capacity: int) -> None:
        self.moves += 1
        for name, old in self._equal.items():
            self._equal[name] = resized(old, (capacity, *old.shape[1:]))
        sources, width = self._before + self._heads * capacity, self._narrow_bias.shape[2]
        self._narrow_bias = resized(self._narrow_bias, (sources, capacity, width))
        for source, old in enumerate(self.narrow):
            readers = capacity - self.first_reader(source)
            self.narrow[source] = resized(old, (len(old), readers * width))
        self._capacity = capacity

    def truncate(self, count: int, *, room: int) -> None:
        """Lets go of the experts after the first `count`, and of more than `room`."""
        del self.widen[count:]
        del self.narrow[self._before + self._heads * count :]
        if count + room >= self._capacity:
            return
        self._resize(count + room)

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
        self._edge_moves = 0

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
            old = self._edges.get(name, tensor.new_empty(0, *tensor.shape))
            if slot == len(old):
                old = resized(old, (slot + 1 + room, *tensor.shape))
                self._edge_moves += 1
            old[slot] = tensor
            self._edges[name] = old
        self.count = slot + 1
        yield

    def truncating(self, count: int, *, room: int) -> Iterator[None]:
        """Lets go of the experts after the first `count`, and of more than `room`, a block a
        step. From the first step on they are gone."""
        self.count = count
        for block in self.blocks:
            block.truncate(count, room=room)
            yield
        for name, old in self._edges.items():
            if len(old) > count + room:
                self._edges[name] = resized(old, (count + room, *old.shape[1:]))
                self._edge_moves += 1

    def edge(self, name: str, count: int) -> Tensor:
        return self._edges[name][:count]

    @property
    def moves(self) -> int:
        """How often memory that living experts lie in was given up for other memory. What was
        found at an address is there for as long as this stays the same."""
        return self._edge_moves + sum(block.moves for block in self.blocks)

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


def resized(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of this shape with what was there as far as it goes, and zeros."""
    new = old.new_zeros(shape)
    kept = tuple(slice(min(sizes)) for sizes in zip(old.shape, shape, strict=True))
    new[kept] = old[kept]
    return new
