"""Count the floating-point operations of the folded form for one image, by arithmetic.

A multiplication and its addition count as two. Matrix products, attention and mixing by attention
weights are counted. LayerNorm, softmax, GELU, additions and masked products are not.
"""

from __future__ import annotations

import math

from model_store.spec import PLAIN, NetworkSpec


def folded_flops(spec: NetworkSpec) -> int:
    layers = spec.depth - (spec.token == "in-sequence")
    total = 2 * len(spec.classes) * spec.token_width
    for index in range(len(spec.experts)):
        width, positions = spec.width_of(index), spec.positions_of(index)
        linear = _task_attention(spec, index) if index else _linear_layers(spec)
        attention = 8 * positions * width**2 + 4 * positions**2 * width
        if spec.attention == "gated":
            attention += 2 * positions**2 * width
        total += stem_flops(spec, index)
        total += layers * (attention + positions * linear)
        if index == 0 and spec.first.pools_patches:
            total += attention + positions * linear
        else:
            total += _token_attention(spec, index) + linear
    return total + _readout(spec)


def stem_flops(spec: NetworkSpec, index: int) -> int:
    """Count the operations from an image to an expert's rows of patches."""
    total, side = 0, spec.image_size
    for convolution in spec.convolutions(spec.width_of(index)):
        side //= convolution.stride
        total += 2 * side**2 * math.prod(convolution.shape)
    return total


def _readout(spec: NetworkSpec) -> int:
    return 2 * spec.positions_of(0) * spec.readout_width if spec.experts else 0


def _linear_layers(spec: NetworkSpec) -> int:
    """Count the linear layers of the first expert at one position; a gate is half of the first."""
    products = 3 if spec.first.activation == "swiglu" else 2
    return 2 * products * spec.mlp_ratio * spec.width_of(0) ** 2


def _token_attention(spec: NetworkSpec, index: int) -> int:
    """Count the token's attention, which reads the positions without projecting them.

    A backbone that turns its keys has to project them. One that pools has a constant query.
    """
    width, heads = spec.width_of(index), spec.experts[index].attention_heads
    kind = PLAIN if index else spec.first
    if kind.rotary or kind.qk_norm:
        positions = spec.positions_of(index)
        return 6 * positions * width**2 + 4 * positions * width + 2 * width**2
    if kind.pooling == "attention":
        return 6 * width**2 + 4 * spec.patches * heads * width
    return 8 * width**2 + 4 * (spec.patches + 1 + kind.registers) * heads * width


def _task_attention(spec: NetworkSpec, index: int) -> int:
    """Count the two linear layers of a block at one position."""
    own, sources = spec.experts[index].heads, spec.source_heads(index)
    narrow, wide = spec.head_width, spec.hidden_width
    scores = 2 * own * (narrow**2 + wide**2) + 2 * own * sources * (narrow + wide)
    widen = own * sources * narrow + 2 * own * sources * (narrow + 1) * wide
    narrowing = 2 * sources * wide * narrow + 4 * own * sources * narrow
    return scores + widen + narrowing
