"""Provide the memory of a pass: one buffer that every pass uses again, cut into views once.

At batch 1 a block is many small products, and cutting new views for each would cost more than
some of the products. Shapes: as in `forward.py`, and k heads of one expert of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_store.inference.stacks import Part
from model_store.network.expert import BlockActivations


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAttentionViews:
    """The task attention of a part in one of the two linear layers."""

    own_NKD: Tensor
    sources_NDH: Tensor
    projected_NKD: Tensor
    scores_NKH: Tensor
    weights_NKH: Tensor
    mask_KH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One expert of a part in the first linear layer.

    `matrix` joins `scaled_NkHD` and a copy of the weights into rows of one matrix. `product` is
    the target of its multiplication: with one head the place in the block itself, else a buffer
    that is copied to `hidden_NkE`.
    """

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
    """One source head in the second linear layer, and the experts of a part that read it."""

    hidden_NE: Tensor
    columns: int
    value: Tensor
    value_NS1D: Tensor
    weights_NSk1: Tensor
    read_NSkD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartViews:
    """Views for the second half of a block, for the experts of one part.

    Example of 2 images of 5 positions (N = 10 rows), a first expert of 3 heads, and a part of
    S = 3 experts of k = 2 heads: K = 6 own heads, H = 9 source heads, D = 4, E = 16, C = k·D = 8.
    The heads of all experts lie side by side in the block's activations, [10, 9, 4 or 16]::

        head      0   1   2 | 3   4 | 5   6 | 7   8 |
        expert    the first |   0   |   1   |   2   |   of the part
                            begin = 3               end = 9
        reads     head 0 up to the expert's own last: 5, 7 and 9 heads

        normed_SNC                  [3, 10, 8]      own heads of each expert, after LayerNorm
        widen, narrow               own [10, 6, 4 or 16], sources [10, 4 or 16, 9],
                                    scores and weights [10, 6, 9], mask [6, 9]
        weights_SkNH                [3, 2, 10, 9]   the weights by expert and head
        read_SkND, read_SNC         [3, 2, 10, 4] and [3, 10, 8]: the sum that the part adds

        readers[1]: expert 1, which reads H = 7 heads
            weights_NkH             [10, 2, 7]
            normed_N1HD             [10, 1, 7, 4]   × weights → scaled_NkHD [10, 2, 7, 4]
            matrix                  [20, 7·4 + 7]   × widen[1] [7·4 + 7, 16] → product [20, 16]
        sources[5]: head 5, which the 2 experts 1 and 2 read
            hidden_NE               [10, 16]        × narrow[5] [16, 2·4] → value [10, 2·4]
            weights_NSk1            [10, 2, 2, 1]   × value_NS1D [10, 2, 1, 4], added to
            read_NSkD               [10, 2, 2, 4]
    """

    part: Part
    normed_SNC: Tensor
    widen: TaskAttentionViews
    narrow: TaskAttentionViews
    weights_SkNH: Tensor
    read_SkND: Tensor
    read_SNC: Tensor
    readers: tuple[Reader, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The numbers of a block, one row a position of an image.

    `block` holds the activations of all experts, [N, H, D] and [N, H, E].
    """

    block: BlockActivations
    first_normed_NC: Tensor
    first_hidden_NE: Tensor
    parts: tuple[PartViews, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes that determine the views of a block. The parts take turns in the second region:

    | normed N·H·D | hidden N·H·E | projected | scores | weights | read | shared |
    '------- the block -----------'----------- one part after the other ---------'
    """

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
        """Count the numbers of the block and of the largest part."""
        block = self.rows * self.heads * (self.head_width + self.hidden_width)
        return block + max((sum(self.regions(part)) for part in self.parts), default=0)

    def regions(self, part: Part) -> tuple[int, int, int, int, int]:
        """Count the numbers of a part: projected queries, scores, weights, sums, and the memory
        that its readers and sources use in turn."""
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
    """The memory of one pass at a time, as large as the largest pass. Lineages may share it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)
        self._views: dict[Layout, Views] = {}

    def views(self, layout: Layout, *, like: Tensor) -> Views:
        self.reserve(layout, like=like)
        found = self._views.get(layout)
        if found is None:
            # Tensors made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                found = cut_views(layout, self._flat)
            self._views[layout] = found
        return found

    def reserve(self, layout: Layout, *, like: Tensor) -> None:
        """Reserve memory for passes up to this size. The system provides it when it is used."""
        old, size = self._flat, layout.size
        if size > len(old) or (old.device, old.dtype) != (like.device, like.dtype):
            self._views.clear()  # they would keep the old memory alive
            with torch.inference_mode(False):
                self._flat = torch.empty(size, dtype=like.dtype, device=like.device)

    def clear(self) -> None:
        """Drop the views of all lineages and release the memory."""
        self._flat = torch.empty(0)
        self._views.clear()


def cut_views(layout: Layout, flat: Tensor) -> Views:
    rows, heads = layout.rows, layout.heads
    normed, hidden, rest = _cut(
        flat, rows * heads * layout.head_width, rows * heads * layout.hidden_width
    )
    block = BlockActivations(
        normed=normed.view(rows, heads, layout.head_width),
        hidden=hidden.view(rows, heads, layout.hidden_width),
    )
    return Views(
        block=block,
        first_normed_NC=normed.view(rows, -1)[:, : layout.first_heads * layout.head_width],
        first_hidden_NE=hidden.view(rows, -1)[:, : layout.first_heads * layout.hidden_width],
        parts=tuple(_part(part, block, _cut(rest, *layout.regions(part))) for part in layout.parts),
    )


def _cut(flat: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split into pieces of these sizes and the rest."""
    return torch.split(flat, [*sizes, len(flat) - sum(sizes)])


def _part(part: Part, block: BlockActivations, regions: tuple[Tensor, ...]) -> PartViews:
    rows, _, narrow = block.normed.shape
    own, heads = slice(part.begin, part.end), part.end - part.begin
    projected, scores, weights, read, shared, _ = regions
    scores_NKH, weights_NKH = scores.view(rows, heads, -1), weights.view(rows, heads, -1)
    weights_NSkH = weights.view(rows, part.count, part.stack.heads, -1)
    read_NSkD = read.view(rows, part.count, part.stack.heads, narrow)
    mask_KH = _mask(part, like=scores)

    def task_attention(sources_NHD: Tensor) -> TaskAttentionViews:
        width = sources_NHD.shape[2]
        return TaskAttentionViews(
            own_NKD=sources_NHD[:, own],
            sources_NDH=sources_NHD[:, : part.end].transpose(1, 2),
            projected_NKD=projected[: rows * heads * width].view(rows, heads, width),
            scores_NKH=scores_NKH,
            weights_NKH=weights_NKH,
            mask_KH=mask_KH,
        )

    return PartViews(
        part=part,
        normed_SNC=block.normed[:, own].view(rows, part.count, -1).transpose(0, 1),
        widen=task_attention(block.normed),
        narrow=task_attention(block.hidden),
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


def _reader(
    part: Part, slot: int, weights_NKH: Tensor, block: BlockActivations, shared: Tensor
) -> Reader:
    rows, _, width = block.normed.shape
    heads = part.stack.heads
    begin = part.begin + slot * heads
    sources = begin + heads
    hidden_NkE = block.hidden[:, begin:sources]
    scaled, product, _ = _cut(shared, rows * heads * sources * (width + 1), hidden_NkE.numel())
    scaled = scaled.view(rows, heads, -1)
    one_head = heads == 1
    return Reader(
        weights_NkH=weights_NKH[:, slot * heads : (slot + 1) * heads, :sources],
        normed_N1HD=block.normed[:, None, :sources],
        scaled_NkHD=scaled[..., : sources * width].view(rows, heads, sources, width),
        scaled_weights_NkH=scaled[..., sources * width :],
        matrix=scaled.flatten(0, 1),
        product=hidden_NkE[:, 0] if one_head else product.view(rows * heads, -1),
        product_NkE=hidden_NkE if one_head else product.view(hidden_NkE.shape),
        hidden_NkE=hidden_NkE,
    )


def _source(
    part: Part,
    source: int,
    weights_NSkH: Tensor,
    block: BlockActivations,
    shared: Tensor,
    read_NSkD: Tensor,
) -> Source:
    rows, _, width = block.normed.shape
    first = part.stack.blocks[0].first_reader(source)
    readers = part.count - first
    value = shared[: rows * readers * width].view(rows, readers * width)
    return Source(
        hidden_NE=block.hidden[:, source],
        columns=readers * width,
        value=value,
        value_NS1D=value.view(rows, readers, 1, width),
        weights_NSk1=weights_NSkH[:, first:, :, source, None],
        read_NSkD=read_NSkD[:, first:],
    )


def _mask(part: Part, *, like: Tensor) -> Tensor:
    """Build [K, H]: minus infinity for sources that are younger than their reader."""
    ages = torch.arange(part.end, device=like.device) - part.begin
    age_H = ages.div(part.stack.heads, rounding_mode="floor")
    age_K1 = age_H[part.begin :, None]
    return like.new_zeros(len(age_K1), part.end).masked_fill_(age_H > age_K1, -torch.inf)
