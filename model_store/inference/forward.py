"""The network for inference: folded experts, all experts of a stage in a few products.

Exact: logits agree with the reference (`network.py`) to rounding. Nothing in a stage depends on
a younger expert, so every version of a lineage can be read off one pass over the longest.

Shapes: B images, P positions, N = B·P, S experts of a run, C channels of each, K heads of a run,
H source heads, D channels of a head, E = D · ratio, I numbers of a patch, Y classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.inference.fold import FoldedExpert, FoldedLinear, fold_expert
from model_store.inference.matmul import (
    multiply_each,
    multiply_each_plus,
    multiply_onto,
    multiply_plus,
    multiplying,
)
from model_store.inference.run import First, Part, Run, stack_up
from model_store.inference.stack import Attention, BlockStack
from model_store.inference.workspace import Asking, Layout, PartViews, Scratch, Views
from model_store.network.expert import Left, Older
from model_store.network.network import Network
from model_store.spec import NetworkSpec


class Lineage:
    """Experts, oldest first. Computes the token, whose first slices are those of older versions.

    One pass at a time: passes share their memory.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        *,
        first: FoldedExpert,
        parts: Sequence[Part],
        scratch: Scratch | None = None,
    ) -> None:
        self.spec = spec
        self._first = first
        self._parts = tuple(parts)
        self._runs: tuple[Run, ...] = (First(first), *self._parts)
        self._scratch = scratch or Scratch()

    @classmethod
    def of(
        cls, network: Network, *, experts: int | None = None, products: torch.dtype | None = None
    ) -> Lineage:
        """The network's first experts, or all, folded into memory of their own. `products`: the
        type of the large ones, where it is not the network's."""
        spec = network.spec if experts is None else network.spec.until(experts)
        weights = network.state_dict()
        with torch.inference_mode(False), torch.no_grad():
            folded = [
                fold_expert(
                    _below(weights, f"experts.{index}."), spec=spec, index=index, products=products
                )
                for index in range(len(spec.tasks))
            ]
            return cls(spec, first=folded[0], parts=stack_up(folded))

    def token(self, images_BCHW: Tensor, *, scratch: Scratch | None = None) -> Tensor:
        """[B, channels of all experts]: the normalised slices, oldest first. `scratch`: memory for
        this pass, where it is not to be the one that lineages share."""
        return self._token(images_BCHW, scratch=scratch or self._scratch)

    def older(self, images_BCHW: Tensor) -> Older:
        """All that an expert to come needs of these, in memory of its own."""
        blocks: list[Left] = []
        token_BC = self._token(images_BCHW, scratch=self._scratch, left=blocks)
        return Older(blocks=tuple(blocks), token_BC=token_BC)

    @torch.no_grad()
    def _token(
        self, images_BCHW: Tensor, *, scratch: Scratch, left: list[Left] | None = None
    ) -> Tensor:
        eps, in_sequence = self.spec.layer_norm_eps, self.spec.token == "in-sequence"
        if images_BCHW.shape[2:] != (self.spec.image_size, self.spec.image_size):
            raise ValueError(f"images of {tuple(images_BCHW.shape[2:])} are not of the spec's size")
        streams = [_embed(run, images_BCHW, size=self.spec.patch_size) for run in self._runs]
        rows = len(images_BCHW) * self.spec.positions
        views = scratch.views(self._layout(rows=rows), like=images_BCHW)
        for layer in range(self.spec.depth - in_sequence):
            for place, run in enumerate(self._runs):
                streams[place] = _attend(streams[place], run.attention(layer), eps=eps)
            self._mix(layer, streams, views)
            if left is not None:
                left.append(_left(views, images=len(images_BCHW)))
        for place, run in enumerate(self._runs):
            x_SBPC = streams[place] if in_sequence else _with_token(run, streams[place])
            streams[place] = _attend_first(x_SBPC, run.attention(-1), eps=eps)
        views = scratch.views(self._layout(rows=len(images_BCHW)), like=images_BCHW)
        self._mix(-1, streams, views)
        if left is not None:
            left.append(_left(views, images=len(images_BCHW)))
        slices = [_slices(run, x, eps=eps) for run, x in zip(self._runs, streams, strict=True)]
        return torch.cat(slices, dim=-1)

    def reserve(self, batch: int) -> None:
        """Memory for passes of up to `batch` images."""
        layout = self._layout(rows=batch * self.spec.positions)
        self._scratch.reserve(layout, like=self._first.edges.token_C)

    @property
    def moves(self) -> tuple[int, ...]:
        """Changes whenever memory of its experts is given up for other memory."""
        return tuple(part.stack.moves for part in self._parts)

    def _layout(self, *, rows: int) -> Layout:
        return Layout(
            rows=rows,
            first_heads=self._first.heads,
            head_width=self.spec.head_width,
            hidden_width=self.spec.hidden_width,
            parts=self._parts,
        )

    def _mix(self, layer: int, streams: list[Tensor], views: Views) -> None:
        """The second half of a block, added to the streams: all widen, then all narrow."""
        block, later = self._first.blocks[layer], streams[1:]
        widen, narrow = _linear(block.widen), _linear(block.narrow)
        x_NC = streams[0].view(views.first_normed_NC.shape)
        self._normalise(layer, streams, views)
        multiply_plus(
            widen.bias_O, views.first_normed_NC, widen.weight_IO, out=views.first_hidden_NE
        )
        for part in views.parts:
            _widen(part, part.part.stack.blocks[layer])
        torch.ops.aten.gelu_(views.hidden_NHE)
        multiply_onto(x_NC.add_(narrow.bias_O), views.first_hidden_NE, narrow.weight_IO)
        for part, x_SBPC in zip(views.parts, later, strict=True):
            _narrow(part, part.part.stack.blocks[layer])
            x_SBPC.flatten(1, 2).add_(part.read_SNC)

    def _normalise(self, layer: int, streams: list[Tensor], views: Views) -> None:
        """What is read in a block carries the scale and bias of its source."""
        eps, block = self.spec.layer_norm_eps, self._first.blocks[layer]
        x_NC = streams[0].view(views.first_normed_NC.shape)
        views.first_normed_NC.copy_(
            F.layer_norm(x_NC, x_NC.shape[-1:], block.norm_weight_C, block.norm_bias_C, eps)
        )
        for view, x_SBPC in zip(views.parts, streams[1:], strict=True):
            stack, count = view.part.stack.blocks[layer], view.part.count
            weight_SC, bias_SC = (
                stack.equal(name, count) for name in ("norm_weight_C", "norm_bias_C")
            )
            normed = F.layer_norm(x_SBPC, x_SBPC.shape[-1:], eps=eps).flatten(1, 2)
            torch.addcmul(bias_SC[:, None], normed, weight_SC[:, None], out=view.normed_SNC)


class FoldedNetwork:
    """A version for inference: a lineage, and a classifier that reads its first slices."""

    def __init__(self, lineage: Lineage, *, weight_YC: Tensor, bias_Y: Tensor) -> None:
        self.lineage = lineage
        self._weight_YC = weight_YC
        self._bias_Y = bias_Y

    @classmethod
    def of(cls, network: Network, *, products: torch.dtype | None = None) -> FoldedNetwork:
        """The folded form of a reference network, in memory of its own. `products`: the type of
        the large ones, where it is not the network's."""
        return cls.classified(Lineage.of(network, products=products), network.state_dict())

    @classmethod
    def classified(cls, lineage: Lineage, weights: Mapping[str, Tensor]) -> FoldedNetwork:
        """The lineage with the task heads of a version, whose weights have their full names."""
        tasks = range(len(lineage.spec.tasks))
        return cls(
            lineage,
            weight_YC=torch.cat([weights[f"heads.{index}.weight"] for index in tasks]),
            bias_Y=torch.cat([weights[f"heads.{index}.bias"] for index in tasks]),
        )

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes], in the order of `spec.classes`."""
        return self.classify(self.lineage.token(images_BCHW))

    def classify(self, token_BC: Tensor) -> Tensor:
        """Logits from the token of this lineage, or of a longer one that begins with it."""
        return F.linear(token_BC[:, : self._weight_YC.shape[1]], self._weight_YC, self._bias_Y)


def _embed(run: Run, images_BCHW: Tensor, *, size: int) -> Tensor:
    """[S, B, P, C]"""
    # B, 3, y, x and then inside the patch, in the order of a convolution's weights
    cut = images_BCHW.unfold(2, size, size).unfold(3, size, size)
    patches_NI = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * size * size)
    embed_SIC, position_SPC = run.edge("embed_IC"), run.edge("position_PC")
    shape = (len(embed_SIC), len(images_BCHW), -1, embed_SIC.shape[2])
    embedded = torch.matmul(patches_NI, embed_SIC).view(shape)
    tokens = position_SPC.shape[1] - embedded.shape[2]
    x_SBPC = position_SPC[:, None].repeat(1, len(images_BCHW), 1, 1)
    x_SBPC[:, :, tokens:].add_(embedded)
    return x_SBPC


def _with_token(run: Run, x_SBPC: Tensor) -> Tensor:
    token_SB1C = run.edge("token_C")[:, None, None].expand(-1, x_SBPC.shape[1], 1, -1)
    return torch.cat((token_SB1C, x_SBPC), dim=2)


def _attend(x_SBPC: Tensor, attention: Attention, *, eps: float) -> Tensor:
    """Adds what every position reads from all positions of its expert."""
    experts, batch, positions, width = x_SBPC.shape
    normed_SNC = F.layer_norm(x_SBPC, (width,), eps=eps).flatten(1, 2)
    qkv_SNX = multiply_each(normed_SNC, attention.qkv_SCX)
    qkv_SNX[..., :width].add_(attention.query_bias_SC[:, None])
    qkv = qkv_SNX.view(experts * batch, positions, 3, attention.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    mixed_SNC = mixed.transpose(1, 2).reshape(normed_SNC.shape)
    x_SNC = x_SBPC.flatten(1, 2).add_(attention.out_bias_SC[:, None])
    return multiply_each_plus(x_SNC, mixed_SNC, attention.out_SCC).view(x_SBPC.shape)


def _attend_first(x_SBPC: Tensor, attention: Attention, *, eps: float) -> Tensor:
    """As `_attend`, for the first position alone: [S, B, 1, C].

    One query reads the positions as they are, by (W_kᵀ q) · n_p and then W_v Σ_p a_p n_p, so
    that no position is projected to a key or a value.
    """
    experts, batch, _, width = x_SBPC.shape
    heads, by_head = attention.heads, (experts, width, attention.heads, -1)
    normed_SBPC = F.layer_norm(x_SBPC, (width,), eps=eps)
    query_SCC, key_SCC, value_SCC = attention.qkv_SCX.chunk(3, dim=-1)
    query_SBC = torch.baddbmm(attention.query_bias_SC[:, None], normed_SBPC[:, :, 0], query_SCC)
    # A product for each expert and head: [S·heads, B, width of a head] and back.
    query = query_SBC.view(experts, batch, heads, -1).transpose(1, 2).flatten(0, 1)
    key = key_SCC.view(by_head).permute(0, 2, 3, 1).flatten(0, 1)
    asked = torch.bmm(query, key).view(experts, heads, batch, width).transpose(1, 2)
    weights = torch.softmax(asked @ normed_SBPC.transpose(-1, -2), dim=-1)
    read = (weights @ normed_SBPC).transpose(1, 2).reshape(-1, batch, width)
    value = value_SCC.view(by_head).transpose(1, 2).flatten(0, 1)
    mixed = torch.bmm(read, value).view(experts, heads, batch, -1)
    mixed_SBC = mixed.transpose(1, 2).reshape(query_SBC.shape)
    x_SBC = x_SBPC[:, :, 0] + attention.out_bias_SC[:, None]
    return torch.baddbmm(x_SBC, mixed_SBC, attention.out_SCC)[:, :, None]


def _weigh(asking: Asking, ask_SDD: Tensor, scale_SK: Tensor) -> None:
    """How much each head reads of each source head, times its scale, into `weights_NKH`."""
    heads = asking.own_NKD.shape[1]
    lone = heads == len(ask_SDD)
    # Once a head: a product that is broadcast over the rows copies the matrices for every row.
    ask_KDD = ask_SDD if lone else ask_SDD.repeat_interleave(heads // len(ask_SDD), dim=0)
    torch.bmm(asking.own_NKD.transpose(0, 1), ask_KDD, out=asking.asked_NKD.transpose(0, 1))
    torch.bmm(asking.asked_NKD, asking.sources_NDH, out=asking.scores_NKH)
    asking.scores_NKH.add_(asking.mask_KH)
    torch.softmax(asking.scores_NKH, dim=-1, out=asking.weights_NKH)
    if not lone:
        asking.weights_NKH.mul_(scale_SK.reshape(-1, 1))


def _widen(view: PartViews, block: BlockStack) -> None:
    """Narrow in, wide out: scaling what is read moves less memory than mixing what is written."""
    count = view.part.count
    _weigh(view.widen, block.equal("widen.ask_DD", count), block.equal("widen.scale_K", count))
    multiply = multiplying(view.normed_SNC, block.widen[0])
    for reader, value in zip(view.readers, block.widen, strict=False):
        torch.mul(reader.weights_NkH.unsqueeze(-1), reader.normed_N1HD, out=reader.scaled_NkHD)
        reader.scaled_weights_NkH.copy_(reader.weights_NkH)
        multiply(reader.matrix, value, out=reader.product)
        if reader.product_NkE is not reader.hidden_NkE:
            reader.hidden_NkE.copy_(reader.product_NkE)


def _narrow(view: PartViews, block: BlockStack) -> None:
    """Wide in, narrow out: multiplied first, for all readers of a source, and mixed after."""
    count = view.part.count
    _weigh(view.narrow, block.equal("narrow.ask_DD", count), block.equal("narrow.scale_K", count))
    bias_S1HD = block.narrow_bias(count)[:, None]
    view.read_SkND.copy_(torch.matmul(view.weights_SkNH, bias_S1HD))
    multiply = multiplying(view.normed_SNC, block.narrow[0])
    for source, value in zip(view.sources, block.narrow, strict=False):
        multiply(source.hidden_NE, value[:, : source.columns], out=source.value)
        source.read_NSkD.addcmul_(source.weights_NSk1, source.value_NS1D)


def _left(views: Views, *, images: int) -> Left:
    """Copies: the next block takes the memory."""
    normed, hidden = (
        one.reshape(images, len(one) // images, -1).clone()
        for one in (views.normed_NHD, views.hidden_NHE)
    )
    return Left(normed=normed, hidden=hidden)


def _slices(run: Run, x_SBPC: Tensor, *, eps: float) -> Tensor:
    """[B, S·C]: what the classifier reads of these experts."""
    weight_S1C, bias_S1C = run.edge("norm_weight_C")[:, None], run.edge("norm_bias_C")[:, None]
    normed_SBC = F.layer_norm(x_SBPC[:, :, 0], x_SBPC.shape[-1:], eps=eps)
    return torch.addcmul(bias_S1C, normed_SBC, weight_S1C).transpose(0, 1).flatten(1)


def _linear(layer: object) -> FoldedLinear:
    if not isinstance(layer, FoldedLinear):
        raise TypeError("a lineage begins with an expert that reads nobody")
    return layer


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
