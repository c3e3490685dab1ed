"""Quantise the large weights of an expert to 8 bits, once for all versions.

Each column (output channel) has its own scale. Numbers stay within ±63: processors without 8-bit
dot products add two products into 16 bits and would saturate beyond it, and then a version would
give different answers on different machines.
"""

from __future__ import annotations

import numpy as np

from model_store.onnx.weights import Array, Arrays

LARGEST = 63
OF_FIRST = ("qkv.weight", "out.weight", "widen.weight", "narrow.weight")
OF_LATER = ("widen.value", "narrow.before", "narrow.own")
"""The weights of large products. Stacked weights and classifiers stay in single precision."""


def quantised(arrays: Arrays, *, is_first: bool) -> Arrays:
    """Quantise the large arrays of an expert, and add their scales."""
    made: dict[str, Array] = {}
    for name, array in arrays.items():
        if name.endswith(OF_FIRST if is_first else OF_LATER):
            made[name], made[f"{name}.scale"] = quantise(array)
        else:
            made[name] = array
    return made


def quantise(weight: Array) -> tuple[Array, Array]:
    """Quantise [..., I, O] to 8 bits, with a scale for each column: [O]."""
    largest = np.abs(weight).max(axis=tuple(range(weight.ndim - 1)))
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale
