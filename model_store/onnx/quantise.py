"""Eight-bit weights: an expert is quantised once, whichever versions use it.

A column (an output channel) has a scale of its own. Numbers stay within ±63: instructions that
add two products of 8 bits into 16 bits would saturate beyond, on processors without 8-bit dot
products, and the same version would answer differently on different machines.
"""

from __future__ import annotations

import numpy as np

from model_store.onnx.weights import Array, Arrays

LARGEST = 63
OF_FIRST = ("qkv.weight", "out.weight", "widen.weight", "narrow.weight")
OF_LATER = ("widen.value", "narrow.before", "narrow.own")
"""The large products. What is stacked, and all of a classifier, stays in single precision."""


def quantised(arrays: Arrays, *, is_first: bool) -> Arrays:
    """An expert's arrays, the large ones in 8 bits with their scales beside them."""
    made: dict[str, Array] = {}
    for name, array in arrays.items():
        if name.endswith(OF_FIRST if is_first else OF_LATER):
            made[name], made[f"{name}.scale"] = quantise(array)
        else:
            made[name] = array
    return made


def quantise(weight: Array) -> tuple[Array, Array]:
    """[…, I, O] in 8 bits, and a scale for each of its columns: [O]."""
    largest = np.abs(weight).max(axis=tuple(range(weight.ndim - 1)))
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale
