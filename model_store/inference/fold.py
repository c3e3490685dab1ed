"""Fold the constants of one expert for inference: the same function with fewer products.

Folded are the scale and bias of the LayerNorm before attention, the biases that the softmax
cancels or passes on, and the product of query and key in task attention. Nothing depends on other
experts, so an expert is folded once for all versions. Sums of products are computed in float64
and then rounded to the type of the weights.

Shapes: C channels of this expert, X = 3C, K its heads, D channels of a head, H heads it reads,
E = D · ratio, P positions, I the numbers that the embedding of a patch reads, O channels that a
convolution writes, V the side of its kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from model_store.network.backbone import tables
from model_store.network.gated import by_place, offsets
from model_store.spec import Backbone, NetworkSpec

Weights = Mapping[str, Tensor]
QK_NORMS = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedPlaces:
    """The part of gated attention that no image changes: its own attention, times the gate.

    The attention by content counts with `content_H`, one minus the gate.
    """

    weights_HPP: Tensor
    content_H: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedTurn:
    """The steps of a backbone between projecting queries and keys and comparing them.

    Keys have a bias here, because the softmax does not cancel it after these steps.
    """

    key_bias_C: Tensor
    norms: tuple[Tensor, ...]
    """Scale and bias of the norm of queries, then of keys; empty without norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAttention:
    """Attention among positions that were normalised without scale and bias.

    Keys have no bias, because the softmax cancels it. The bias of the values is in `out_bias_C`,
    because attention weights sum to one. The factor 1/√width of the scores is in the queries.
    """

    qkv_CX: Tensor
    query_bias_C: Tensor
    out_CC: Tensor
    out_bias_C: Tensor
    places: FoldedPlaces | None
    """None: the attention is plain."""
    turned: FoldedTurn | None = None
    """None: queries and keys are compared as they are projected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLinear:
    """A linear layer of the first expert, which reads no other expert."""

    weight_IO: Tensor
    bias_O: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedTaskAttention:
    """Task attention. Own head i weighs source head j by softmax_j((n_i · query_key) · n_j).

    An expert of one head has its scale folded into the values, and then `scale_K` is 1.
    """

    query_key_DD: Tensor
    value_HDE: Tensor
    value_bias_HE: Tensor
    scale_K: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedBlock:
    """One block. Younger experts read the output of the LayerNorm `norm_*`, so it is not folded."""

    attention: FoldedAttention
    norm_weight_C: Tensor
    norm_bias_C: Tensor
    widen: FoldedLinear | FoldedTaskAttention
    narrow: FoldedLinear | FoldedTaskAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedBackbone:
    """The tensors of a backbone that no plain expert has; empty tuples for those it has not."""

    kind: Backbone
    pre_norm: tuple[Tensor, ...]
    """Scale and bias."""
    turns: tuple[Tensor, ...]
    """Cosines and sines of all rows, [P, channels of an attention head]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedConvolution:
    """A convolution of a stem, before a ReLU."""

    weight_OIVV: Tensor
    bias_O: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedEdges:
    """The tensors of an expert before and after its blocks.

    `position_PC` includes the bias of the embedding and, in its first row, a token in the sequence.
    """

    stem: tuple[FoldedConvolution, ...]
    """The convolutions before the embedding; empty where it reads the pixels of a patch."""
    embed_IC: Tensor
    position_PC: Tensor
    token_C: Tensor
    norm_weight_C: Tensor | None
    """None: attention pooling, whose slice has no norm."""
    norm_bias_C: Tensor | None
    backbone: FoldedBackbone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedExpert:
    heads: int
    attention_heads: int
    edges: FoldedEdges
    blocks: tuple[FoldedBlock, ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Give every tensor with its path, such as `blocks.0.widen.query_key_DD`."""
        return named_tensors(self)


def fold_expert(
    weights: Weights, *, spec: NetworkSpec, index: int, matmul_dtype: torch.dtype | None = None
) -> FoldedExpert:
    """Fold an expert from the state of an `Expert`. The result shares no memory with `weights`."""
    expert = spec.experts[index]
    return FoldedExpert(
        heads=expert.heads,
        attention_heads=expert.attention_heads,
        edges=fold_edges(weights, spec=spec, index=index),
        blocks=tuple(fold_blocks(weights, spec=spec, index=index, matmul_dtype=matmul_dtype)),
    )


def fold_edges(weights: Weights, *, spec: NetworkSpec, index: int) -> FoldedEdges:
    token = weights["token"]
    norm = _fold_norm(weights, "norm")
    return FoldedEdges(
        stem=tuple(
            FoldedConvolution(
                weight_OIVV=_kept(weights[f"stem.{place}.weight"], like=token),
                bias_O=_kept(weights[f"stem.{place}.bias"], like=token),
            )
            for place in range(len(spec.convolutions(len(token))) - 1)
        ),
        embed_IC=_kept(weights["patch_embed.weight"].flatten(1).T, like=token),
        position_PC=_fold_position(weights, spec=spec),
        token_C=_kept(token, like=token),
        norm_weight_C=norm[0] if norm else None,
        norm_bias_C=norm[1] if norm else None,
        backbone=_fold_backbone(weights, spec=spec) if index == 0 else None,
    )


def _fold_backbone(weights: Weights, *, spec: NetworkSpec) -> FoldedBackbone | None:
    if spec.backbone is None:
        return None
    turns: tuple[Tensor, ...] = ()
    if spec.backbone.rotary:
        angles = weights["rotary.angles"]
        made = tables(angles.double(), before=1, after=spec.backbone.registers)
        turns = tuple(_kept(one, like=angles) for one in made)
    return FoldedBackbone(kind=spec.backbone, pre_norm=_fold_norm(weights, "pre_norm"), turns=turns)


def _fold_norm(weights: Weights, name: str) -> tuple[Tensor, ...]:
    """Give scale and bias of a LayerNorm, or nothing if there is none of this name."""
    if f"{name}.weight" not in weights:
        return ()
    return tuple(
        _kept(weights[f"{name}.{part}"], like=weights["token"]) for part in ("weight", "bias")
    )


def fold_blocks(
    weights: Weights, *, spec: NetworkSpec, index: int, matmul_dtype: torch.dtype | None = None
) -> Iterator[FoldedBlock]:
    """Fold one block after the other, each on demand.

    `matmul_dtype` is the type that the weights of large products are rounded to, if any.
    """
    heads = spec.experts[index].attention_heads
    pooled = index == 0 and spec.first.pooling == "attention"
    for name in spec.blocks:
        block = _fold_block(under(weights, f"{name}."), attention_heads=heads, patches=spec.patches)
        if index == 0 and (spec.first.rotary or spec.first.qk_norm):
            block = replace(block, attention=_fold_turned(under(weights, f"{name}."), heads=heads))
        if pooled and name == spec.blocks[-1]:
            block = replace(block, attention=_fold_pooling(block.attention, weights, name, heads))
        # The last block has one position an image, and no large product.
        every_row = index == 0 and spec.first.pools_patches
        if matmul_dtype is None or (name == spec.blocks[-1] and not every_row):
            yield block
        else:
            yield _rounded(block, matmul_dtype)


def named_tensors(part: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a folded part with their paths."""
    if isinstance(part, Tensor):
        yield prefix, part
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from named_tensors(one, f"{prefix}.{number}")
    elif is_dataclass(part):
        for field in fields(part):
            name = f"{prefix}.{field.name}" if prefix else field.name
            yield from named_tensors(getattr(part, field.name), name)


def _rounded(block: FoldedBlock, dtype: torch.dtype) -> FoldedBlock:
    attention = replace(
        block.attention,
        qkv_CX=block.attention.qkv_CX.to(dtype),
        out_CC=block.attention.out_CC.to(dtype),
    )
    widen, narrow = block.widen, block.narrow
    if isinstance(widen, FoldedTaskAttention):  # its biases are rows of the value matrix
        widen = replace(widen, value_bias_HE=widen.value_bias_HE.to(dtype))
    return replace(
        block,
        attention=attention,
        widen=_layer_rounded(widen, dtype),
        narrow=_layer_rounded(narrow, dtype),
    )


def _layer_rounded(
    layer: FoldedLinear | FoldedTaskAttention, dtype: torch.dtype
) -> FoldedLinear | FoldedTaskAttention:
    if isinstance(layer, FoldedLinear):
        return replace(layer, weight_IO=layer.weight_IO.to(dtype))
    return replace(layer, value_HDE=layer.value_HDE.to(dtype))


def _fold_position(weights: Weights, *, spec: NetworkSpec) -> Tensor:
    position = weights["position"].double().clone()
    in_sequence = spec.token == "in-sequence"
    position[int(in_sequence) : spec.positions] += weights["patch_embed.bias"].double()
    if in_sequence:
        position[0] += weights["token"].double()
    return _kept(position, like=weights["position"])


def _fold_block(weights: Weights, *, attention_heads: int, patches: int) -> FoldedBlock:
    norm_weight, norm_bias = weights["norm2.weight"], weights["norm2.bias"]
    return FoldedBlock(
        attention=_fold_attention(weights, heads=attention_heads, patches=patches),
        norm_weight_C=_kept(norm_weight, like=norm_weight),
        norm_bias_C=_kept(norm_bias, like=norm_bias),
        widen=_fold_layer(under(weights, "widen.")),
        narrow=_fold_layer(under(weights, "narrow.")),
    )


def _fold_attention(weights: Weights, *, heads: int, patches: int) -> FoldedAttention:
    scale, shift = weights["norm1.weight"].double(), weights["norm1.bias"].double()
    qkv_XC = weights["attention.qkv.weight"].double()
    bias_X = qkv_XC @ shift
    if "attention.qkv.bias" in weights:
        bias_X += weights["attention.qkv.bias"].double()
    query_bias, _, value_bias = bias_X.chunk(3)
    folded_XC = qkv_XC * scale
    per_root_width = (len(scale) // heads) ** -0.5
    folded_XC[: len(scale)] *= per_root_width
    out, out_bias = weights["attention.out.weight"], weights["attention.out.bias"]
    return FoldedAttention(
        qkv_CX=_kept(folded_XC.T, like=out),
        query_bias_C=_kept(query_bias * per_root_width, like=out),
        out_CC=_kept(out.T, like=out),
        out_bias_C=_kept(out_bias.double() + out.double() @ value_bias, like=out),
        places=_fold_places(weights, patches=patches) if "attention.gate" in weights else None,
    )


def _fold_turned(weights: Weights, *, heads: int) -> FoldedAttention:
    """Fold the attention of a backbone, whose keys keep their bias."""
    plain = _fold_attention(weights, heads=heads, patches=0)
    like, width = weights["attention.out.weight"], len(weights["norm1.weight"])
    key_CC = weights["attention.qkv.weight"].double()[width : 2 * width]
    key_bias = key_CC @ weights["norm1.bias"].double()
    if "attention.qkv.bias" in weights:
        key_bias += weights["attention.qkv.bias"].double()[width : 2 * width]
    turn = FoldedTurn(key_bias_C=_kept(key_bias, like=like), norms=())
    if "attention.q_norm.weight" not in weights:
        return replace(plain, turned=turn)
    root_width = (width // heads) ** 0.5
    qkv_CX = plain.qkv_CX.clone()
    qkv_CX[:, :width] *= root_width  # the norm would cancel the factor; it goes after the norm
    norms = [weights[f"attention.{one}"] for one in QK_NORMS]
    scaled = [one.double() / root_width for one in norms[:2]]
    return replace(
        plain,
        qkv_CX=qkv_CX,
        query_bias_C=plain.query_bias_C * root_width,
        turned=replace(turn, norms=tuple(_kept(one, like=like) for one in (*scaled, *norms[2:]))),
    )


def _fold_pooling(
    attention: FoldedAttention, weights: Weights, block: str, heads: int
) -> FoldedAttention:
    """Make the query, which no image changes, a constant: it is all of the queries' bias."""
    token, width = weights["token"], len(weights["token"])
    query = weights[f"{block}.attention.qkv.weight"].double()[:width] @ token.double()
    if f"{block}.attention.qkv.bias" in weights:
        query += weights[f"{block}.attention.qkv.bias"].double()[:width]
    qkv_CX = attention.qkv_CX.clone()
    qkv_CX[:, :width] = 0
    query_bias_C = _kept(query * (width // heads) ** -0.5, like=token)
    return replace(attention, qkv_CX=qkv_CX, query_bias_C=query_bias_C)


def _fold_places(weights: Weights, *, patches: int) -> FoldedPlaces:
    like, locality = weights["attention.gate"], weights["attention.locality"]
    gate_H = torch.sigmoid(like.double())
    places_HPP = by_place(locality.double(), offsets(patches).to(locality).double())
    return FoldedPlaces(
        weights_HPP=_kept(gate_H[:, None, None] * places_HPP, like=like),
        content_H=_kept(torch.sigmoid(-like.double()), like=like),
    )


def _fold_layer(weights: Weights) -> FoldedLinear | FoldedTaskAttention:
    if "weight" in weights:
        weight, bias = weights["weight"], weights["bias"]
        return FoldedLinear(weight_IO=_kept(weight.T, like=weight), bias_O=_kept(bias, like=bias))
    like = weights["query"]
    query, key = like.double(), weights["key"].double()
    value, bias, scale = weights["value"], weights["value_bias"], weights["scale"]
    if len(scale) == 1:  # a single factor rounds to the same bits in either type
        value, bias, scale = value * scale, bias * scale, torch.ones_like(scale)
    return FoldedTaskAttention(
        query_key_DD=_kept(query.T @ key * len(query) ** -0.5, like=like),
        value_HDE=_kept(value, like=like),
        value_bias_HE=_kept(bias, like=like),
        scale_K=_kept(scale, like=like),
    )


def _kept(tensor: Tensor, *, like: Tensor) -> Tensor:
    """Round to the type of the weights, in new memory, so that the weights can be released."""
    return tensor.to(dtype=like.dtype, memory_format=torch.contiguous_format, copy=True)


def under(weights: Weights, prefix: str) -> Weights:
    """Select the weights of a prefix, by their names after it."""
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
