"""Compute the network for inference: folded experts, all experts of a run in a few products.

Logits agree with the reference (`network/network.py`) to rounding. No expert depends on a younger
one, so one pass over the longest version of a lineage answers for all versions of it.

Shapes: B images, P positions, N = B·P, S experts of a run, C channels of each, K heads of a run,
H source heads, D channels of a head, E = D · ratio, I numbers of a patch, Y classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.inference.attention import (
    attend,
    attend_first,
    attend_pooled,
    multiply_onto,
    multiply_plus,
    multiplying,
)
from model_store.inference.fold import (
    FoldedBackbone,
    FoldedBlock,
    FoldedExpert,
    FoldedLinear,
    fold_expert,
    under,
)
from model_store.inference.stacks import BlockStack, First, Part, RunWeights, stack_up
from model_store.inference.workspace import Layout, PartViews, Scratch, TaskAttentionViews, Views
from model_store.network.backbone import activate, standardise
from model_store.network.expert import BlockActivations, FrozenContext
from model_store.network.network import Network
from model_store.network.readout import read_rows, shares_of
from model_store.spec import Activation, Backbone, Convolution, NetworkSpec

STEM_PARTS = ("weight_OIVV", "bias_O")
TASK_ATTENTION = ("query_key_DD", "scale_K")


class Lineage:
    """The experts of a version, oldest first. Computes the token that classifiers read.

    The first slices of the token are those of older versions. Passes share their memory, so only
    one may run at a time.
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
        self._runs: tuple[RunWeights, ...] = (First(first), *self._parts)
        self._scratch = scratch or Scratch()
        # Tensors made in inference mode cannot be used outside of it.
        with torch.inference_mode(False):
            self._shares = {
                block: shares_RP.to(first.edges.token_C)
                for block, shares_RP in shares_of(spec).items()
            }

    @classmethod
    def of(
        cls,
        network: Network,
        *,
        experts: int | None = None,
        matmul_dtype: torch.dtype | None = None,
    ) -> Lineage:
        """Fold the network's first experts, or all, into new memory.

        `matmul_dtype` is the type of large products, if it is not the network's.
        """
        spec = network.spec if experts is None else network.spec.until(experts)
        weights = network.state_dict()
        with torch.inference_mode(False), torch.no_grad():
            folded = [
                fold_expert(
                    under(weights, f"experts.{index}."),
                    spec=spec,
                    index=index,
                    matmul_dtype=matmul_dtype,
                )
                for index in range(len(spec.experts))
            ]
            return cls(spec, first=folded[0], parts=stack_up(spec, folded))

    def token(self, images_BCHW: Tensor, *, scratch: Scratch | None = None) -> Tensor:
        """Compute the normalised slices, oldest first: [B, channels of all experts].

        `scratch` is memory for this pass alone, in place of the memory that lineages share.
        """
        return self._token(images_BCHW, scratch=scratch or self._scratch)

    def frozen_context(self, images_BCHW: Tensor) -> FrozenContext:
        """Compute the features that a younger expert reads, in new memory."""
        blocks: list[BlockActivations] = []
        token_BC = self._token(images_BCHW, scratch=self._scratch, kept=blocks)
        return FrozenContext(blocks=tuple(blocks), token_BC=token_BC)

    @torch.no_grad()
    def _token(
        self,
        images_BCHW: Tensor,
        *,
        scratch: Scratch,
        kept: list[BlockActivations] | None = None,
    ) -> Tensor:
        eps, in_sequence = self.spec.layer_norm_eps, self.spec.token == "in-sequence"
        if images_BCHW.shape[2:] != (self.spec.image_size, self.spec.image_size):
            raise ValueError(f"images of {tuple(images_BCHW.shape[2:])} are not of the spec's size")
        streams = [
            _embed(run, images_BCHW, spec=self.spec, tokens=int(in_sequence)) for run in self._runs
        ]
        streams[0] = _embed_backbone(streams[0], self._first.edges.backbone, eps=eps)
        rows = len(images_BCHW) * self.spec.positions
        views = scratch.views(self._layout(rows=rows), like=images_BCHW)
        keeps, earlier = kept is not None, list[Tensor]()
        for layer in range(self.spec.depth - in_sequence):
            for place, run in enumerate(self._runs):
                streams[place] = attend(streams[place], run.attention(layer), eps=eps)
            self._mix(layer, streams, views, keeps=keeps)
            earlier += self._read(layer + 1, streams[0])
            if kept is not None:
                kept.append(_copied(views.block, images=len(images_BCHW)))
        for place, run in enumerate(self._runs):
            streams[place] = self._attend_last(place, run, streams[place])
        views = scratch.views(self._layout(rows=len(images_BCHW)), like=images_BCHW)
        self._mix(-1, streams, views, keeps=keeps)
        if kept is not None:
            kept.append(_copied(views.block, images=len(images_BCHW)))
        streams[0] = self._pooled(streams[0])
        normed = [_normed(run, x, eps=eps) for run, x in zip(self._runs, streams, strict=True)]
        normed[0] = self._with_mean(normed[0])
        # The slices of a run side by side: [B, S·C].
        first, *later = (x_SBPC.transpose(0, 1).flatten(1) for x_SBPC in normed)
        return torch.cat((first, *earlier, *later), dim=-1)

    def _read(self, block: int, x_SBPC: Tensor) -> list[Tensor]:
        """Read the output of a block of the first expert; nothing if the spec does not name it."""
        if block not in self._shares:
            return []
        return [read_rows(x_SBPC[0], self._shares[block], eps=self.spec.layer_norm_eps)]

    def _attend_last(self, place: int, run: RunWeights, x_SBPC: Tensor) -> Tensor:
        """Compute the token's attention, and all of the last block's that a backbone needs."""
        eps, kind = self.spec.layer_norm_eps, self.spec.first
        if place == 0 and kind.pooling == "attention":
            return attend_pooled(x_SBPC, run.attention(-1), eps=eps)
        if place == 0 and kind.pools_patches:
            return attend(x_SBPC, run.attention(-1), eps=eps)
        if self.spec.token == "class-attention":
            x_SBPC = _with_token(run, x_SBPC)
        return attend_first(x_SBPC, run.attention(-1), eps=eps)

    def _pooled(self, x_SBPC: Tensor) -> Tensor:
        """Give what the last norm of the first expert reads, as one row an image."""
        if self.spec.first.pooling != "mean":
            return x_SBPC
        return x_SBPC[:, :, 1 : self.spec.positions].mean(dim=2, keepdim=True)

    def _with_mean(self, normed_SBPC: Tensor) -> Tensor:
        """Keep the row of the first expert's token, and add the mean of its patches to it."""
        if self.spec.first.pooling != "token-and-mean":
            return normed_SBPC
        mean = normed_SBPC[:, :, 1 : self.spec.positions].mean(dim=2, keepdim=True)
        return torch.cat((normed_SBPC[:, :, :1], mean), dim=2)

    def reserve(self, batch: int) -> None:
        """Reserve memory for passes of up to `batch` images."""
        layout = self._layout(rows=batch * self.spec.positions)
        self._scratch.reserve(layout, like=self._first.edges.token_C)

    @property
    def relocations(self) -> tuple[int, ...]:
        """Count for each stack how often its experts took new memory."""
        return tuple(part.stack.relocations for part in self._parts)

    def _layout(self, *, rows: int) -> Layout:
        return Layout(
            rows=rows,
            first_heads=self._first.heads,
            head_width=self.spec.head_width,
            hidden_width=self.spec.hidden_width,
            parts=self._parts,
        )

    def _mix(self, layer: int, streams: list[Tensor], views: Views, *, keeps: bool = False) -> None:
        """Add the second half of a block to the streams: all experts widen, then all narrow.

        A backbone is computed before the others, because its rows and its activation differ.
        Unless something reads its activations, they are not copied to the views.
        """
        block, later = self._first.blocks[layer], streams[1:]
        widen, narrow = _linear(block.widen), _linear(block.narrow)
        backbone, hidden_NHE = self.spec.backbone, views.block.hidden
        if backbone is not None:
            shown = views if later or keeps else None
            streams[0] = self._mix_backbone(block, backbone, streams[0], shown)
            hidden_NHE = hidden_NHE[:, self._first.heads :]
        else:
            x_NC = streams[0].view(views.first_normed_NC.shape)
            self._normalise_first(block, x_NC, views)
            multiply_plus(
                widen.bias_O, views.first_normed_NC, widen.weight_IO, out=views.first_hidden_NE
            )
        self._normalise_later(layer, later, views)
        for part in views.parts:
            _widen(part, part.part.stack.blocks[layer])
        torch.ops.aten.gelu_(hidden_NHE)
        if backbone is None:
            multiply_onto(x_NC.add_(narrow.bias_O), views.first_hidden_NE, narrow.weight_IO)
        for part, x_SBPC in zip(views.parts, later, strict=True):
            _narrow(part, part.part.stack.blocks[layer])
            x_SBPC.flatten(1, 2).add_(part.read_SNC)

    def _mix_backbone(
        self, block: FoldedBlock, kind: Backbone, x_SBPC: Tensor, views: Views | None
    ) -> Tensor:
        """Compute the second half of a backbone's block, and show its first rows to others."""
        widen, narrow = _linear(block.widen), _linear(block.narrow)
        weight_C, bias_C, eps = block.norm_weight_C, block.norm_bias_C, self.spec.layer_norm_eps
        x_NC = x_SBPC.reshape(-1, x_SBPC.shape[-1])
        normed_NC = F.layer_norm(x_NC, x_NC.shape[-1:], weight_C, bias_C, eps)
        widened = x_NC.new_empty(len(x_NC), len(widen.bias_O))
        multiply_plus(widen.bias_O, normed_NC, widen.weight_IO, out=widened)
        activated = _activated(widened, kind.activation)
        hidden_NE = standardise(activated, channels=kind.hidden_norm, eps=eps)
        if views is not None:
            images = x_SBPC.shape[1]
            rows = len(views.first_normed_NC) // images
            for mine, shown in (
                (normed_NC, views.first_normed_NC),
                (hidden_NE, views.first_hidden_NE),
            ):
                shown.copy_(mine.view(images, -1, mine.shape[-1])[:, :rows].flatten(0, 1))
        multiply_onto(x_NC.add_(narrow.bias_O), hidden_NE, narrow.weight_IO)
        return x_NC.view(x_SBPC.shape)

    def _normalise_first(self, block: FoldedBlock, x_NC: Tensor, views: Views) -> None:
        eps = self.spec.layer_norm_eps
        views.first_normed_NC.copy_(
            F.layer_norm(x_NC, x_NC.shape[-1:], block.norm_weight_C, block.norm_bias_C, eps)
        )

    def _normalise_later(self, layer: int, later: Sequence[Tensor], views: Views) -> None:
        """Normalise the streams of later experts, each with the scale and bias of its own."""
        eps = self.spec.layer_norm_eps
        for view, x_SBPC in zip(views.parts, later, strict=True):
            stack, count = view.part.stack.blocks[layer], view.part.count
            weight_SC, bias_SC = (
                stack.equal(name, count) for name in ("norm_weight_C", "norm_bias_C")
            )
            normed = F.layer_norm(x_SBPC, x_SBPC.shape[-1:], eps=eps).flatten(1, 2)
            torch.addcmul(bias_SC[:, None], normed, weight_SC[:, None], out=view.normed_SNC)


class FoldedNetwork:
    """A version for inference: a lineage and a classifier that reads the lineage's token."""

    def __init__(self, lineage: Lineage, *, weight_YC: Tensor, bias_Y: Tensor) -> None:
        self.lineage = lineage
        self._weight_YC = weight_YC
        self._bias_Y = bias_Y

    @classmethod
    def of(cls, network: Network, *, matmul_dtype: torch.dtype | None = None) -> FoldedNetwork:
        """Fold a reference network into new memory.

        `matmul_dtype` is the type of large products, if it is not the network's.
        """
        return cls.classified(Lineage.of(network, matmul_dtype=matmul_dtype), network.state_dict())

    @classmethod
    def classified(cls, lineage: Lineage, weights: Mapping[str, Tensor]) -> FoldedNetwork:
        """Join a lineage and the task heads of a version, given by their full names."""
        tasks = range(len(lineage.spec.tasks))
        return cls(
            lineage,
            weight_YC=torch.cat([weights[f"heads.{index}.weight"] for index in tasks]),
            bias_Y=torch.cat([weights[f"heads.{index}.bias"] for index in tasks]),
        )

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Compute the logits [B, classes], in the order of `spec.classes`."""
        return self.classify(self.lineage.token(images_BCHW))

    def classify(self, token_BC: Tensor) -> Tensor:
        """Compute logits from the token of this lineage, or of a longer one that begins with it."""
        return F.linear(token_BC[:, : self._weight_YC.shape[1]], self._weight_YC, self._bias_Y)


def _embed(run: RunWeights, images_BCHW: Tensor, *, spec: NetworkSpec, tokens: int) -> Tensor:
    """Cut images into patches and embed them: [S, B, P, C], after `tokens` other rows."""
    embed_SIC, position_SPC = run.edge("embed_IC"), run.edge("position_PC")
    *stem, last = spec.convolutions(embed_SIC.shape[2])
    features = images_BCHW
    for place, one in enumerate(stem):
        weight_SOIVV, bias_SO = (run.edge(f"stem.{place}.{part}") for part in STEM_PARTS)
        features = F.conv2d(
            features,
            weight_SOIVV.flatten(0, 1),
            bias_SO.flatten(),
            stride=one.stride,
            padding=one.padding,
            groups=len(bias_SO) if place else 1,  # all experts read the same image
        ).relu_()
    if stem:
        apart = (len(images_BCHW), len(embed_SIC), -1, *features.shape[2:])
        by_expert = features.view(apart).transpose(0, 1).flatten(0, 1)
        patches = _cut(by_expert, last).view(len(embed_SIC), -1, embed_SIC.shape[1])
    else:
        patches = _cut(images_BCHW, last)
    shape = (len(embed_SIC), len(images_BCHW), -1, embed_SIC.shape[2])
    embedded = torch.matmul(patches, embed_SIC).view(shape)
    x_SBPC = position_SPC[:, None].repeat(1, len(images_BCHW), 1, 1)
    x_SBPC[:, :, tokens : tokens + embedded.shape[2]].add_(embedded)
    return x_SBPC


def _cut(features_BCHW: Tensor, last: Convolution) -> Tensor:
    """Cut out what the embedding reads of each patch: [B · patches, I]."""
    padded = F.pad(features_BCHW, (last.padding,) * 4) if last.padding else features_BCHW
    # [B, C, y, x, rows, columns of the patch]: a convolution's weights have the same order
    cut = padded.unfold(2, last.side, last.stride).unfold(3, last.side, last.stride)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, cut.shape[1] * last.side**2)


def _embed_backbone(x_SBPC: Tensor, backbone: FoldedBackbone | None, *, eps: float) -> Tensor:
    if backbone is None or not backbone.pre_norm:
        return x_SBPC
    weight_C, bias_C = backbone.pre_norm
    return F.layer_norm(x_SBPC, x_SBPC.shape[-1:], weight_C, bias_C, eps)


def _with_token(run: RunWeights, x_SBPC: Tensor) -> Tensor:
    token_SB1C = run.edge("token_C")[:, None, None].expand(-1, x_SBPC.shape[1], 1, -1)
    return torch.cat((token_SB1C, x_SBPC), dim=2)


def _weigh(views: TaskAttentionViews, query_key_SDD: Tensor, scale_SK: Tensor) -> None:
    """Compute the weight of each source head for each own head, times the own head's scale."""
    heads, experts = views.own_NKD.shape[1], len(query_key_SDD)
    one_head = heads == experts
    # A matrix for each head: a product broadcast over the rows would copy it for every row.
    query_key_KDD = (
        query_key_SDD if one_head else query_key_SDD.repeat_interleave(heads // experts, dim=0)
    )
    projected_KND = views.projected_NKD.transpose(0, 1)
    torch.bmm(views.own_NKD.transpose(0, 1), query_key_KDD, out=projected_KND)
    torch.bmm(views.projected_NKD, views.sources_NDH, out=views.scores_NKH)
    views.scores_NKH.add_(views.mask_KH)
    torch.softmax(views.scores_NKH, dim=-1, out=views.weights_NKH)
    if not one_head:
        views.weights_NKH.mul_(scale_SK.reshape(-1, 1))


def _widen(view: PartViews, block: BlockStack) -> None:
    """Compute the first linear layer: scale its narrow inputs, then multiply."""
    count = view.part.count
    query_key_SDD, scale_SK = (block.equal(f"widen.{one}", count) for one in TASK_ATTENTION)
    _weigh(view.widen, query_key_SDD, scale_SK)
    multiply = multiplying(view.normed_SNC, block.widen[0])
    for reader, value in zip(view.readers, block.widen, strict=False):
        torch.mul(reader.weights_NkH.unsqueeze(-1), reader.normed_N1HD, out=reader.scaled_NkHD)
        reader.scaled_weights_NkH.copy_(reader.weights_NkH)
        multiply(reader.matrix, value, out=reader.product)
        if reader.product_NkE is not reader.hidden_NkE:
            reader.hidden_NkE.copy_(reader.product_NkE)


def _narrow(view: PartViews, block: BlockStack) -> None:
    """Compute the second linear layer: multiply, then mix its narrow outputs."""
    count = view.part.count
    query_key_SDD, scale_SK = (block.equal(f"narrow.{one}", count) for one in TASK_ATTENTION)
    _weigh(view.narrow, query_key_SDD, scale_SK)
    bias_S1HD = block.narrow_bias(count)[:, None]
    view.read_SkND.copy_(torch.matmul(view.weights_SkNH, bias_S1HD))
    multiply = multiplying(view.normed_SNC, block.narrow[0])
    for source, value in zip(view.sources, block.narrow, strict=False):
        multiply(source.hidden_NE, value[:, : source.columns], out=source.value)
        source.read_NSkD.addcmul_(source.weights_NSk1, source.value_NS1D)


def _copied(block: BlockActivations, *, images: int) -> BlockActivations:
    """Copy the activations, because the next block overwrites them: [B, P, H·D] and [B, P, H·E]."""
    normed, hidden = (
        one.reshape(images, len(one) // images, -1).clone() for one in (block.normed, block.hidden)
    )
    return BlockActivations(normed=normed, hidden=hidden)


def _activated(x: Tensor, kind: Activation) -> Tensor:
    """Apply an activation, in place where it is one function of each number."""
    if kind == "gelu":
        return torch.ops.aten.gelu_(x)  # type: ignore[no-any-return]
    if kind == "tanh-gelu":
        return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]
    return activate(x, kind)


def _normed(run: RunWeights, x_SBPC: Tensor, *, eps: float) -> Tensor:
    """Apply the last norm of each expert of a run, where it has one."""
    if not run.has_norm:
        return x_SBPC
    weight_SC, bias_SC = run.edge("norm_weight_C"), run.edge("norm_bias_C")
    normed_SBPC = F.layer_norm(x_SBPC, x_SBPC.shape[-1:], eps=eps)
    return torch.addcmul(bias_SC[:, None, None], normed_SBPC, weight_SC[:, None, None])


def _linear(layer: object) -> FoldedLinear:
    if not isinstance(layer, FoldedLinear):
        raise TypeError("the first expert of a lineage has no linear layers of its own")
    return layer
