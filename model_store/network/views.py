"""Where the numbers of a pass lie: memory that every pass uses again, and views cut out of it once.

At batch 1 a block is many small products, and cutting views anew for each would cost more than
some of them. Shapes: as in `folded.py`, and k heads of one expert of a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_store.network.run import Part


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


class Scratch:
    """Memory for one pass at a time, as large as the largest so far. Lineages may share it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)
        self._views: dict[Layout, Views] = {}

    def views(self, layout: Layout, *, like: Tensor) -> Views:
        found = self._views.get(layout)
        if found is None:
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                found = self._cut(layout, like=like)
            self._views[layout] = found
        return found

    def clear(self) -> None:
        """Forgets all lineages, and gives the memory back."""
        self._flat = torch.empty(0)
        self._views.clear()

    @property
    def bytes(self) -> int:
        return self._flat.nbytes

    def _cut(self, layout: Layout, *, like: Tensor) -> Views:
        needed = Cutter(None, device="meta")
        cut_views(layout, needed)
        old = self._flat
        if needed.used > len(old) or (old.device, old.dtype) != (like.device, like.dtype):
            self._views.clear()  # they hold on to the memory that is given up here
            self._flat = torch.empty(needed.used, dtype=like.dtype, device=like.device)
        return cut_views(layout, Cutter(self._flat, device=like.device))


class Cutter:
    """Cuts tensors out of flat memory. Without any it only counts."""

    def __init__(self, flat: Tensor | None, *, device: torch.device | str) -> None:
        self.device = device
        self.used = 0
        self.most = 0
        self._flat = flat

    def __call__(self, *shape: int) -> Tensor:
        begin, size = self.used, math.prod(shape)
        self.used += -(-size // 16) * 16  # whole cache lines
        self.most = max(self.most, self.used)
        if self._flat is None:
            return torch.empty(shape, device=self.device)
        return self._flat[begin : begin + size].view(shape)


def cut_views(layout: Layout, cut: Cutter) -> Views:
    heads = layout.parts[-1].end if layout.parts else layout.first_heads
    block = Block(
        normed_NHD=cut(layout.rows, heads, layout.head_width),
        hidden_NHE=cut(layout.rows, heads, layout.hidden_width),
    )
    shared = cut.used
    parts = []
    for part in layout.parts:
        cut.used = shared  # one part after the other uses what follows
        parts.append(_part(part, block, cut))
    cut.used = cut.most
    return Views(
        hidden_NHE=block.hidden_NHE,
        first_normed_NC=block.normed_NHD.flatten(1)[:, : layout.first_heads * layout.head_width],
        first_hidden_NE=block.hidden_NHE.flatten(1)[:, : layout.first_heads * layout.hidden_width],
        parts=tuple(parts),
    )


def _part(part: Part, block: Block, cut: Cutter) -> PartViews:
    rows, _, narrow = block.normed_NHD.shape
    own, heads = slice(part.begin, part.end), part.end - part.begin
    asked = cut(rows * heads * block.hidden_NHE.shape[2])
    scores, weights = cut(rows, heads, part.end), cut(rows, heads, part.end)
    read = cut(rows, part.count, part.stack.heads, narrow)
    by_expert = weights.view(rows, part.count, part.stack.heads, -1)
    before = cut.used
    readers = tuple(_reader(part, slot, weights, block, cut, before) for slot in range(part.count))
    cut.used = before
    values = cut(rows * part.count * narrow)
    mask = _mask(part, like=scores)

    def asking(sources_NHD: Tensor) -> Asking:
        width = sources_NHD.shape[2]
        return Asking(
            own_NKD=sources_NHD[:, own],
            sources_NDH=sources_NHD[:, : part.end].transpose(1, 2),
            asked_NKD=asked[: rows * heads * width].view(rows, heads, width),
            scores_NKH=scores,
            weights_NKH=weights,
            mask_KH=mask,
        )

    return PartViews(
        part=part,
        normed_SNC=block.normed_NHD[:, own].view(rows, part.count, -1).transpose(0, 1),
        widen=asking(block.normed_NHD),
        narrow=asking(block.hidden_NHE),
        weights_SkNH=by_expert.permute(1, 2, 0, 3),
        read_SkND=read.permute(1, 2, 0, 3),
        read_SNC=read.flatten(2).transpose(0, 1),
        readers=readers,
        sources=tuple(
            _source(part, source, by_expert, block, values, read) for source in range(part.end)
        ),
    )


def _reader(
    part: Part, slot: int, weights_NKH: Tensor, block: Block, cut: Cutter, before: int
) -> Reader:
    rows, _, width = block.normed_NHD.shape
    heads = part.stack.heads
    begin = part.begin + slot * heads
    sources = begin + heads
    cut.used = before  # one reader after the other uses it
    scaled = cut(rows, heads, sources * (width + 1))
    hidden_NkE = block.hidden_NHE[:, begin:sources]
    product = hidden_NkE[:, 0] if heads == 1 else cut(rows * heads, hidden_NkE.shape[2])
    return Reader(
        weights_NkH=weights_NKH[:, slot * heads : (slot + 1) * heads, :sources],
        normed_N1HD=block.normed_NHD[:, None, :sources],
        scaled_NkHD=scaled[..., : sources * width].view(rows, heads, sources, width),
        scaled_weights_NkH=scaled[..., sources * width :],
        matrix=scaled.flatten(0, 1),
        product=product,
        product_NkE=product.view(hidden_NkE.shape) if heads > 1 else hidden_NkE,
        hidden_NkE=hidden_NkE,
    )


def _source(
    part: Part, source: int, weights_NSkH: Tensor, block: Block, values: Tensor, read_NSkD: Tensor
) -> Source:
    rows, _, width = block.normed_NHD.shape
    first = part.stack.blocks[0].first_reader(source)
    readers = part.count - first
    value = values[: rows * readers * width].view(rows, readers * width)
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
