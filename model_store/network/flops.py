"""Count the floating-point operations of the folded form for one image, by arithmetic.

A multiplication and its addition count as two. Matrix products, attention and mixing by attention
weights are counted. LayerNorm, softmax, GELU, additions and masked products are not.
"""

from __future__ import annotations

from model_store.spec import NetworkSpec


def folded_flops(spec: NetworkSpec) -> int:
    in_sequence = spec.token == "in-sequence"
    positions, layers = spec.positions, spec.depth - in_sequence
    total = 2 * len(spec.classes) * spec.token_width
    for index in range(len(spec.tasks)):
        width = spec.width_of(index)
        linear = _task_attention(spec, index) if index else 4 * spec.mlp_ratio * width**2
        attention = 8 * positions * width**2 + 4 * positions**2 * width
        if spec.attention == "gated":
            attention += 2 * positions**2 * width
        total += 2 * spec.patches * 3 * spec.patch_size**2 * width
        total += layers * (attention + positions * linear)
        total += _token_attention(spec, index) + linear
    return total


def _token_attention(spec: NetworkSpec, index: int) -> int:
    """Count the token's attention, which reads the positions without projecting them."""
    width, heads = spec.width_of(index), spec.tasks[index].expert.attention_heads
    return 8 * width**2 + 4 * (spec.patches + 1) * heads * width


def _task_attention(spec: NetworkSpec, index: int) -> int:
    """Count the two linear layers of a block at one position."""
    own, sources = spec.tasks[index].expert.heads, spec.source_heads(index)
    narrow, wide = spec.head_width, spec.hidden_width
    scores = 2 * own * (narrow**2 + wide**2) + 2 * own * sources * (narrow + wide)
    widen = own * sources * narrow + 2 * own * sources * (narrow + 1) * wide
    narrowing = 2 * sources * wide * narrow + 4 * own * sources * narrow
    return scores + widen + narrowing
