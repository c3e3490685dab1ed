"""One expert, re-associated for inference: the same function of the same numbers, cheaper.

What folds is the expert's own: the scale and bias of the LayerNorm before its attention, the
biases that the softmax forgets or passes on, the product of task attention's query and key. So
an expert is folded once, whichever versions use it. All products are made in float64.

Shapes: C channels of this expert, X = 3C, K its heads, D channels of a head, H heads it reads,
E = D · ratio, P positions, I = 3 · patch², the numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from model_store.spec import NetworkSpec

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAttention:
    """Attention among positions whose channels were normalised without scale and bias.

    Keys have no bias, because the softmax forgets it; that of the values is in `out_bias_C`,
    because attention weights sum to one; 1/√width of the scores is in the queries.
    """

    qkv_CX: Tensor
    query_bias_C: Tensor
    out_CC: Tensor
    out_bias_C: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLinear:
    """A linear layer of the first expert, which reads nobody but itself."""

    weight_IO: Tensor
    bias_O: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedReading:
    """Task attention. Own head i reads source head j by softmax_j((n_i · ask) · n_j).

    The scale of a lone head is in its values, and then `scale_K` is 1.
    """

    ask_DD: Tensor
    value_HDE: Tensor
    value_bias_HE: Tensor
    scale_K: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedBlock:
    """`norm_*` is of the LayerNorm that younger experts read through: it stays with its source."""

    attention: FoldedAttention
    norm_weight_C: Tensor
    norm_bias_C: Tensor
    widen: FoldedLinear | FoldedReading
    narrow: FoldedLinear | FoldedReading


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedEdges:
    """What an expert has before and after its blocks.

    `position_PC` has the embedding's bias in it, and, where the token is in the sequence, the
    token in its first row.
    """

    embed_IC: Tensor
    position_PC: Tensor
    token_C: Tensor
    norm_weight_C: Tensor
    norm_bias_C: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedExpert:
    heads: int
    attention_heads: int
    edges: FoldedEdges
    blocks: tuple[FoldedBlock, ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with a name of its own, `blocks.0.widen.ask_DD` for instance."""
        return named_tensors(self)


def fold_expert(
    weights: Weights, *, spec: NetworkSpec, index: int, products: torch.dtype | None = None
) -> FoldedExpert:
    """`weights` by the names of an `Expert`'s state. Nothing of them is kept."""
    expert = spec.tasks[index].expert
    return FoldedExpert(
        heads=expert.heads,
        attention_heads=expert.attention_heads,
        edges=fold_edges(weights, spec=spec),
        blocks=tuple(fold_blocks(weights, spec=spec, index=index, products=products)),
    )


def fold_edges(weights: Weights, *, spec: NetworkSpec) -> FoldedEdges:
    token = weights["token"]
    return FoldedEdges(
        embed_IC=_kept(weights["patch_embed.weight"].flatten(1).T, like=token),
        position_PC=_fold_position(weights, in_sequence=spec.token == "in-sequence"),
        token_C=_kept(token, like=token),
        norm_weight_C=_kept(weights["norm.weight"], like=token),
        norm_bias_C=_kept(weights["norm.bias"], like=token),
    )


def fold_blocks(
    weights: Weights, *, spec: NetworkSpec, index: int, products: torch.dtype | None = None
) -> Iterator[FoldedBlock]:
    """One block after the other, each when it is asked for. `products`: the type in which the
    weights of large products are kept, where it is not their own."""
    heads = spec.tasks[index].expert.attention_heads
    for name in spec.blocks:
        block = _fold_block(_under(weights, f"{name}."), attention_heads=heads)
        # The last block has one position an image, and no product that is large.
        if products is None or name == spec.blocks[-1]:
            yield block
        else:
            yield _with_products(block, products)


def named_tensors(part: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folded part by the path that leads to each."""
    if isinstance(part, Tensor):
        yield prefix, part
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from named_tensors(one, f"{prefix}.{number}")
    elif is_dataclass(part):
        for field in fields(part):
            name = f"{prefix}.{field.name}" if prefix else field.name
            yield from named_tensors(getattr(part, field.name), name)


def _with_products(block: FoldedBlock, dtype: torch.dtype) -> FoldedBlock:
    attention = replace(
        block.attention,
        qkv_CX=block.attention.qkv_CX.to(dtype),
        out_CC=block.attention.out_CC.to(dtype),
    )
    widen, narrow = block.widen, block.narrow
    if isinstance(widen, FoldedReading):  # whose biases are rows of the same matrix
        widen = replace(widen, value_bias_HE=widen.value_bias_HE.to(dtype))
    return replace(
        block,
        attention=attention,
        widen=_layer_with_products(widen, dtype),
        narrow=_layer_with_products(narrow, dtype),
    )


def _layer_with_products(
    layer: FoldedLinear | FoldedReading, dtype: torch.dtype
) -> FoldedLinear | FoldedReading:
    if isinstance(layer, FoldedLinear):
        return replace(layer, weight_IO=layer.weight_IO.to(dtype))
    return replace(layer, value_HDE=layer.value_HDE.to(dtype))


def _fold_position(weights: Weights, *, in_sequence: bool) -> Tensor:
    position = weights["position"].double().clone()
    position[int(in_sequence) :] += weights["patch_embed.bias"].double()
    if in_sequence:
        position[0] += weights["token"].double()
    return _kept(position, like=weights["position"])


def _fold_block(weights: Weights, *, attention_heads: int) -> FoldedBlock:
    norm_weight, norm_bias = weights["norm2.weight"], weights["norm2.bias"]
    return FoldedBlock(
        attention=_fold_attention(weights, heads=attention_heads),
        norm_weight_C=_kept(norm_weight, like=norm_weight),
        norm_bias_C=_kept(norm_bias, like=norm_bias),
        widen=_fold_layer(_under(weights, "widen.")),
        narrow=_fold_layer(_under(weights, "narrow.")),
    )


def _fold_attention(weights: Weights, *, heads: int) -> FoldedAttention:
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
    )


def _fold_layer(weights: Weights) -> FoldedLinear | FoldedReading:
    if "weight" in weights:
        weight, bias = weights["weight"], weights["bias"]
        return FoldedLinear(weight_IO=_kept(weight.T, like=weight), bias_O=_kept(bias, like=bias))
    like = weights["query"]
    query, key = like.double(), weights["key"].double()
    value, bias, scale = weights["value"], weights["value_bias"], weights["scale"]
    if len(scale) == 1:  # one factor is rounded once in either precision
        value, bias, scale = value * scale, bias * scale, torch.ones_like(scale)
    return FoldedReading(
        ask_DD=_kept(query.T @ key * len(query) ** -0.5, like=like),
        value_HDE=_kept(value, like=like),
        value_bias_HE=_kept(bias, like=like),
        scale_K=_kept(scale, like=like),
    )


def _kept(tensor: Tensor, *, like: Tensor) -> Tensor:
    """Rounded to the weights' type, in memory of its own: they can be let go of."""
    return tensor.to(dtype=like.dtype, memory_format=torch.contiguous_format, copy=True)


def _under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
