"""Where the numbers of a pass lie: memory that every pass uses again, and views cut out of it once.

At batch 1 a block is many small products, and cutting views anew for each would cost more than
some of them. Shapes: as in `folded.py`, and k heads of one expert of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_store.inference.run import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What all experts leave in a block for younger ones to read, heads side by side."""

    normed_NHD: Tensor
    hidden_NHE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The task attention of a part in one of the two linear layers."""

    own_NKD: Tensor
    sources_NDH: Tensor
    asked_NKD: Tensor
    scores_NKH: Tensor
    weights_NKH: Tensor
    mask_KH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What one expert reads in the first linear layer: `scaled`, and after it a copy of the
    weights, are the rows of one matrix. `product` is where it is multiplied to; with more heads
    than one that is not yet its place among the others."""

    weights_NkH: Tensor
    normed_N1HD: Tensor
    scaled_NkHD: Tensor
    scaled_weights_NkH: Tensor
    matrix: Tensor
    product: Tensor
    product_NkE: Tensor
    hidden_NkE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one head gives to its readers in the second linear layer."""

    hidden_NE: Tensor
    columns: int
    value: Tensor
    value_NS1D: Tensor
    weights_NSk1: Tensor
    read_NSkD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartViews:
    part: Part
    normed_SNC: Tensor
    widen: Asking
    narrow: Asking
    weights_SkNH: Tensor
    read_SkND: Tensor
    read_SNC: Tensor
    readers: tuple[Reader, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The numbers of a block in this many rows, one a position of an image."""

    normed_NHD: Tensor
    hidden_NHE: Tensor
    first_normed_NC: Tensor
    first_hidden_NE: Tensor
    parts: tuple[PartViews, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that the views of a block depend on."""

    rows: int
    first_heads: int
    head_width: int
    hidden_width: int
    parts: tuple[Part, ...]

    @property
    def heads(self) -> int:
        return self.parts[-1].end if self.parts else self.first_heads

    @property
    def size(self) -> int:
        """Numbers in all; one part after the other uses the memory behind the block's own."""
        block = self.rows * self.heads * (self.head_width + self.hidden_width)
        return block + max((sum(self.regions(part)) for part in self.parts), default=0)

    def regions(self, part: Part) -> tuple[int, int, int, int, int]:
        """Numbers for a part: questions, scores, weights, what is read, and what is used anew by
        every reader and every source."""
        heads = part.end - part.begin
        scores = self.rows * heads * part.end
        reader = part.stack.heads * (part.end * (self.head_width + 1) + self.hidden_width)
        return (
            self.rows * heads * self.hidden_width,
            scores,
            scores,
            self.rows * heads * self.head_width,
            self.rows * max(reader, part.count * self.head_width),
        )


class Scratch:
    """Memory for one pass at a time, as large as the largest so far. Lineages may share it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)
        self._views: dict[Layout, Views] = {}

    def views(self, layout: Layout, *, like: Tensor) -> Views:
        self.reserve(layout, like=like)
        found = self._views.get(layout)
        if found is None:
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                found = cut_views(layout, self._flat)
            self._views[layout] = found
        return found

    def reserve(self, layout: Layout, *, like: Tensor) -> None:
        """Memory for passes up to this size, which takes none before it is used."""
        old, size = self._flat, layout.size
        if size > len(old) or (old.device, old.dtype) != (like.device, like.dtype):
            self._views.clear()  # they hold on to the memory that is given up here
            with torch.inference_mode(False):
                self._flat = torch.empty(size, dtype=like.dtype, device=like.device)

    def clear(self) -> None:
        """Forgets all lineages, and gives the memory back."""
        self._flat = torch.empty(0)
        self._views.clear()


def cut_views(layout: Layout, flat: Tensor) -> Views:
    rows, heads = layout.rows, layout.heads
    normed, hidden, rest = _cut(
        flat, rows * heads * layout.head_width, rows * heads * layout.hidden_width
    )
    block = Block(
        normed_NHD=normed.view(rows, heads, layout.head_width),
        hidden_NHE=hidden.view(rows, heads, layout.hidden_width),
    )
    return Views(
        normed_NHD=block.normed_NHD,
        hidden_NHE=block.hidden_NHE,
        first_normed_NC=normed.view(rows, -1)[:, : layout.first_heads * layout.head_width],
        first_hidden_NE=hidden.view(rows, -1)[:, : layout.first_heads * layout.hidden_width],
        parts=tuple(_part(part, block, _cut(rest, *layout.regions(part))) for part in layout.parts),
    )


def _cut(flat: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Pieces of these sizes, and what is left."""
    return torch.split(flat, [*sizes, len(flat) - sum(sizes)])


def _part(part: Part, block: Block, regions: tuple[Tensor, ...]) -> PartViews:
    rows, _, narrow = block.normed_NHD.shape
    own, heads = slice(part.begin, part.end), part.end - part.begin
    asked, scores, weights, read, shared, _ = regions
    scores_NKH, weights_NKH = scores.view(rows, heads, -1), weights.view(rows, heads, -1)
    weights_NSkH = weights.view(rows, part.count, part.stack.heads, -1)
    read_NSkD = read.view(rows, part.count, part.stack.heads, narrow)
    mask_KH = _mask(part, like=scores)

    def asking(sources_NHD: Tensor) -> Asking:
        width = sources_NHD.shape[2]
        return Asking(
            own_NKD=sources_NHD[:, own],
            sources_NDH=sources_NHD[:, : part.end].transpose(1, 2),
            asked_NKD=asked[: rows * heads * width].view(rows, heads, width),
            scores_NKH=scores_NKH,
            weights_NKH=weights_NKH,
            mask_KH=mask_KH,
        )

    return PartViews(
        part=part,
        normed_SNC=block.normed_NHD[:, own].view(rows, part.count, -1).transpose(0, 1),
        widen=asking(block.normed_NHD),
        narrow=asking(block.hidden_NHE),
        weights_SkNH=weights_NSkH.permute(1, 2, 0, 3),
        read_SkND=read_NSkD.permute(1, 2, 0, 3),
        read_SNC=read_NSkD.flatten(2).transpose(0, 1),
        readers=tuple(
            _reader(part, slot, weights_NKH, block, shared) for slot in range(part.count)
        ),
        sources=tuple(
            _source(part, source, weights_NSkH, block, shared, read_NSkD)
            for source in range(part.end)
        ),
    )


def _reader(part: Part, slot: int, weights_NKH: Tensor, block: Block, shared: Tensor) -> Reader:
    rows, _, width = block.normed_NHD.shape
    heads = part.stack.heads
    begin = part.begin + slot * heads
    sources = begin + heads
    hidden_NkE = block.hidden_NHE[:, begin:sources]
    scaled, product, _ = _cut(shared, rows * heads * sources * (width + 1), hidden_NkE.numel())
    scaled = scaled.view(rows, heads, -1)
    lone = heads == 1
    return Reader(
        weights_NkH=weights_NKH[:, slot * heads : (slot + 1) * heads, :sources],
        normed_N1HD=block.normed_NHD[:, None, :sources],
        scaled_NkHD=scaled[..., : sources * width].view(rows, heads, sources, width),
        scaled_weights_NkH=scaled[..., sources * width :],
        matrix=scaled.flatten(0, 1),
        product=hidden_NkE[:, 0] if lone else product.view(rows * heads, -1),
        product_NkE=hidden_NkE if lone else product.view(hidden_NkE.shape),
        hidden_NkE=hidden_NkE,
    )


def _source(
    part: Part, source: int, weights_NSkH: Tensor, block: Block, shared: Tensor, read_NSkD: Tensor
) -> Source:
    rows, _, width = block.normed_NHD.shape
    first = part.stack.blocks[0].first_reader(source)
    readers = part.count - first
    value = shared[: rows * readers * width].view(rows, readers * width)
    return Source(
        hidden_NE=block.hidden_NHE[:, source],
        columns=readers * width,
        value=value,
        value_NS1D=value.view(rows, readers, 1, width),
        weights_NSk1=weights_NSkH[:, first:, :, source, None],
        read_NSkD=read_NSkD[:, first:],
    )


def _mask(part: Part, *, like: Tensor) -> Tensor:
    """[K, H]: minus infinity where a source is younger than its reader."""
    ages = torch.arange(part.end, device=like.device) - part.begin
    age_H = ages.div(part.stack.heads, rounding_mode="floor")
    age_K1 = age_H[part.begin :, None]
    return like.new_zeros(len(age_K1), part.end).masked_fill_(age_H > age_K1, -torch.inf)
