"""Write products with weights, in single precision or in 8 bits by the type of the weight.

In 8 bits an image is answered the same in every batch (docs/adr/103). Rows are quantised row by
row, or as a whole where a pass takes one image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from onnx import TensorProto

from model_store.onnx.writer import Writer
from model_store.spec import NetworkSpec

FUSED = "com.microsoft"
"""The operators of onnxruntime beyond the standard."""
LONE_POSITIONS = 128
"""Positions from which a lone image fills the products, so that a batch is not faster."""
STEP, ZERO = 1 / 127, 128
"""Of rows that were divided by their largest value."""
LEAST = 1e-30
"""The least size of a row: one of zeros is not divided by zero."""


def passes_alone(spec: NetworkSpec) -> bool:
    """Return whether a pass in 8 bits takes one image."""
    return spec.positions_of(0) >= LONE_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a product. In 8 bits they mean (value - zero) · step · size."""

    value: str
    step: str = ""
    zero: str = ""
    size: str = ""
    """The largest absolute value of each row: [N, 1]. Empty for one step for all rows."""


def rows_for(writer: Writer, x: str, weight: str, *, spec: NetworkSpec) -> Rows:
    """Quantise `x` if this weight is in 8 bits. The nodes are shared by all weights that read `x`.

    What the second linear layer of a block reads has a few values that are much larger than all
    others, so it is quantised row by row in any case.
    """
    if not writer.has(f"{weight}.scale"):
        return Rows(value=x)
    if passes_alone(spec) and ".narrow." not in weight:
        quantise = partial(writer.ops, "DynamicQuantizeLinear", x, count=3)
        value, step, zero = writer.once("quantised", x, quantise)
        return Rows(value=value, step=step, zero=zero)
    step = writer.constant(np.asarray(STEP, dtype=np.float32))
    zero = writer.constant(np.asarray(ZERO, dtype=np.uint8))
    quantise = partial(_row_by_row, writer, x, step=step, zero=zero)
    value, size = writer.once("quantised row by row", x, quantise)
    return Rows(value=value, step=step, zero=zero, size=size)


def _row_by_row(writer: Writer, x: str, *, step: str, zero: str) -> list[str]:
    """Divide rows by their sizes and quantise them; give the sizes too."""
    largest = writer.op("ReduceMax", writer.op("Abs", x), writer.integers(-1), keepdims=1)
    size = writer.op("Max", largest, writer.number(LEAST))
    return [writer.op("QuantizeLinear", writer.op("Div", x, size), step, zero), size]


def by_head(writer: Writer, rows: Rows, *, heads: int, width: int) -> Rows:
    """Split the heads: [N, heads · width] to [heads, N, width]."""
    split = writer.reshape(rows.value, -1, heads, width)
    return replace(rows, value=writer.transpose(split, 1, 0, 2))


def first_of(writer: Writer, rows: Rows, *, count: int) -> Rows:
    return replace(rows, value=writer.first(rows.value, end=count, axis=0))


def multiplied(writer: Writer, rows: Rows, weight: str) -> str:
    if not rows.step:
        return writer.op("MatMul", rows.value, weight)
    scale = f"{weight}.scale"
    if rows.size and writer.fused:
        given = (rows.value, weight, rows.step, scale, rows.zero)
        product = writer.op("MatMulIntegerToFloat", *given, domain=FUSED)
    else:
        whole = writer.op("MatMulInteger", rows.value, weight, rows.zero)
        steps = writer.op("Mul", rows.step, scale)
        product = writer.op("Mul", writer.op("Cast", whole, to=TensorProto.FLOAT), steps)
    return writer.op("Mul", product, rows.size) if rows.size else product


def product(writer: Writer, x: str, weight: str, *, spec: NetworkSpec) -> str:
    """Multiply rows with a matrix."""
    return multiplied(writer, rows_for(writer, x, weight, spec=spec), weight)
