"""Turn a folded expert into named arrays, and arrays into the bytes of a file.

The arrays depend on the folded expert and on the heads before its run (`NetworkSpec.runs`). No
younger expert changes them, so all versions with this expert have the same arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.fold import (
    QK_NORMS,
    FoldedAttention,
    FoldedBackbone,
    FoldedBlock,
    FoldedExpert,
    FoldedLinear,
    FoldedPlaces,
    FoldedTaskAttention,
)
from model_store.spec import PLAIN, Backbone, Token

Array = NDArray[Any]
Arrays = Mapping[str, Array]

ALIGNMENT = 64
"""In bytes. Runtimes use an array inside a mapped file if it begins at a cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of arrays one after the other, named by the SHA-256 of its bytes."""

    name: str
    data: bytes
    offsets: Mapping[str, int]


def pack(arrays: Arrays) -> DataFile:
    """Pack arrays into one file, in this order."""
    parts: list[bytes] = []
    offsets: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        offsets[name] = end
        padding = -array.nbytes % ALIGNMENT
        parts += [array.tobytes(), bytes(padding)]
        end += array.nbytes + padding
    data = b"".join(parts)
    return DataFile(name=f"{hashlib.sha256(data).hexdigest()}.bin", data=data, offsets=offsets)


def classifier_arrays(weight_YC: Tensor, bias_Y: Tensor) -> Arrays:
    return {"weight": _array(weight_YC.T), "bias": _array(bias_Y)}


def expert_arrays(expert: FoldedExpert, *, before: int, token: Token) -> Arrays:
    """Name the arrays of an expert. `before` counts the heads before its run; 0 for the first."""
    arrays = dict(_expert(expert, before=before))
    pooled = expert.edges.norm_weight_C is None
    if token == "in-sequence" or pooled:
        del arrays["token"]  # `position` includes it, or the constant query does
    return arrays


def _expert(expert: FoldedExpert, *, before: int) -> Iterator[tuple[str, Array]]:
    edges = expert.edges
    for place, convolution in enumerate(edges.stem):
        yield f"stem.{place}.weight", _array(convolution.weight_OIVV)
        yield f"stem.{place}.bias", _array(convolution.bias_O)
    yield "embed", _array(edges.embed_IC)
    yield "position", _array(edges.position_PC)
    yield "token", _array(edges.token_C)
    if edges.norm_weight_C is not None and edges.norm_bias_C is not None:
        yield "norm.weight", _array(edges.norm_weight_C)
        yield "norm.bias", _array(edges.norm_bias_C)
    if edges.backbone is not None:
        yield from _backbone(edges.backbone)
    *others, last = expert.blocks
    for number, block in enumerate(others):
        yield from _block(block, f"blocks.{number}", before, _attention(block.attention))
    if last.attention.turned is not None or _kind(expert).pools_patches:
        reading = _attention(last.attention)
    else:
        reading = _last_attention(last.attention, heads=expert.attention_heads)
    if _kind(expert).pooling == "attention":
        del reading["query.weight"]  # the query is the same for all images
    yield from _block(last, "blocks.last", before, reading)


def _kind(expert: FoldedExpert) -> Backbone:
    backbone = expert.edges.backbone
    return PLAIN if backbone is None else backbone.kind


def _backbone(backbone: FoldedBackbone) -> Iterator[tuple[str, Array]]:
    names = ("pre_norm.weight", "pre_norm.bias"), ("turn.cos", "turn.sin")
    for parts, tensors in zip(names, (backbone.pre_norm, backbone.turns), strict=True):
        for name, tensor in zip(parts, tensors, strict=False):
            yield name, _array(tensor)


def _block(
    block: FoldedBlock, name: str, before: int, attention: Arrays
) -> Iterator[tuple[str, Array]]:
    for part, array in attention.items():
        yield f"{name}.attention.{part}", array
    yield f"{name}.norm.weight", _array(block.norm_weight_C)
    yield f"{name}.norm.bias", _array(block.norm_bias_C)
    for part, layer in (("widen", block.widen), ("narrow", block.narrow)):
        for inner, array in _layer(layer, before=before if part == "narrow" else None).items():
            yield f"{name}.{part}.{inner}", array


def _attention(attention: FoldedAttention) -> dict[str, Array]:
    # Only queries have a bias. Zeros for the rest make product and sum one operation.
    none = torch.zeros_like(attention.query_bias_C)
    turned = attention.turned
    keys = none if turned is None else turned.key_bias_C
    norms = () if turned is None else turned.norms
    return {
        "qkv.weight": _array(attention.qkv_CX),
        "qkv.bias": _array(torch.cat((attention.query_bias_C, keys, none))),
        "out.weight": _array(attention.out_CC),
        "out.bias": _array(attention.out_bias_C),
        **_places(attention.places),
        **{name: _array(norm) for name, norm in zip(QK_NORMS, norms, strict=False)},
    }


def _places(places: FoldedPlaces | None) -> Arrays:
    if places is None:
        return {}
    content_H11 = places.content_H[:, None, None]
    return {"places": _array(places.weights_HPP), "content": _array(content_H11)}


def _last_attention(attention: FoldedAttention, *, heads: int) -> dict[str, Array]:
    """Split keys [heads, width, C] and values [heads, C, width], for attention of one query."""
    query_CC, key_CC, value_CC = attention.qkv_CX.chunk(3, dim=1)
    by_head = (len(query_CC), heads, -1)
    return {
        "query.weight": _array(query_CC),
        "query.bias": _array(attention.query_bias_C),
        "key": _array(key_CC.reshape(by_head).permute(1, 2, 0)),
        "value": _array(value_CC.reshape(by_head).permute(1, 0, 2)),
        "out.weight": _array(attention.out_CC),
        "out.bias": _array(attention.out_bias_C),
    }


def _layer(layer: FoldedLinear | FoldedTaskAttention, *, before: int | None) -> Arrays:
    """Name the arrays of a linear layer.

    The values of task attention are one matrix for all sources if `before` is None. Otherwise
    they are a matrix for each source, in two arrays: sources before the run, and in the run.
    """
    if isinstance(layer, FoldedLinear):
        return {"weight": _array(layer.weight_IO), "bias": _array(layer.bias_O)}
    value_HDE = layer.value_HDE
    values = (
        {"value": _array(value_HDE.flatten(0, 1))}
        if before is None
        else {"before": _array(value_HDE[:before]), "own": _array(value_HDE[before:])}
    )
    # An expert of one head has its scale in the values.
    scale = {"scale": _array(layer.scale_K)} if len(layer.scale_K) > 1 else {}
    bias = _array(layer.value_bias_HE)
    return {"query_key": _array(layer.query_key_DD), **values, "bias": bias, **scale}


def _array(tensor: Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
