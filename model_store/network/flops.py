"""Floating-point operations for one image, by arithmetic: two for a multiplication and addition.

Matrix products, attention products and mixing by attention weights are counted; LayerNorm,
softmax, GELU and additions are not. What a mask throws away does not count as done.
"""

from __future__ import annotations

from collections.abc import Callable

from model_store.spec import NetworkSpec

CountOfExpert = Callable[[NetworkSpec, int], int]


def folded_flops(spec: NetworkSpec) -> int:
    """Of the folded form (`folded.py`)."""
    return _flops(spec, _read_first, _folded_reading)


def reference_flops(spec: NetworkSpec) -> int:
    """Of the paper's equations as they stand, with a key and a value for every source head."""
    return _flops(spec, _project_and_read_first, _literal_reading)


def _flops(spec: NetworkSpec, last_attention: CountOfExpert, reading: CountOfExpert) -> int:
    in_sequence = spec.token == "in-sequence"
    positions, layers = spec.positions, spec.depth - in_sequence
    total = 2 * len(spec.classes) * spec.token_width
    for index in range(len(spec.tasks)):
        width = spec.width_of(index)
        linear = reading(spec, index) if index else 4 * spec.mlp_ratio * width**2
        attention = 8 * positions * width**2 + 4 * positions**2 * width
        total += 2 * spec.patches * 3 * spec.patch_size**2 * width
        total += layers * (attention + positions * linear)
        total += last_attention(spec, index) + linear
    return total


def _project_and_read_first(spec: NetworkSpec, index: int) -> int:
    """The token's attention, after projecting all positions to queries, keys and values."""
    width, positions = spec.width_of(index), _read_positions(spec)
    return 6 * positions * width**2 + 4 * positions * width + 2 * width**2


def _read_first(spec: NetworkSpec, index: int) -> int:
    """The token's attention on the positions as they are."""
    width, heads = spec.width_of(index), spec.tasks[index].expert.attention_heads
    return 8 * width**2 + 4 * _read_positions(spec) * heads * width


def _read_positions(spec: NetworkSpec) -> int:
    return spec.patches + 1


def _literal_reading(spec: NetworkSpec, index: int) -> int:
    own, sources = spec.tasks[index].expert.heads, spec.source_heads(index)
    total = 0
    for reads, writes in _layers(spec):
        projections = 2 * (own + sources) * reads**2
        values = 2 * sources * reads * writes
        total += projections + values + 2 * own * sources * (reads + writes)
    return total


def _folded_reading(spec: NetworkSpec, index: int) -> int:
    own, sources = spec.tasks[index].expert.heads, spec.source_heads(index)
    (narrow, wide), _ = _layers(spec)
    asking = 2 * own * (narrow**2 + wide**2) + 2 * own * sources * (narrow + wide)
    widen = own * sources * narrow + 2 * own * sources * (narrow + 1) * wide
    narrowing = 2 * sources * wide * narrow + 4 * own * sources * narrow
    return asking + widen + narrowing


def _layers(spec: NetworkSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a head reads and writes in the two linear layers of a block."""
    narrow, wide = spec.head_width, spec.hidden_width
    return (narrow, wide), (wide, narrow)
