"""Write products with weights, in single precision or in 8 bits by the type of the weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx import TensorProto

from model_store.onnx.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a product. In 8 bits they mean (value - zero) · step."""

    value: str
    step: str = ""
    zero: str = ""


def rows_for(writer: Writer, x: str, weight: str) -> Rows:
    """Quantise `x` if this weight is in 8 bits. The node is shared by all weights that read `x`."""
    if not writer.has(f"{weight}.scale"):
        return Rows(value=x)
    value, step, zero = writer.once("DynamicQuantizeLinear", x, count=3)
    return Rows(value=value, step=step, zero=zero)


def by_head(writer: Writer, rows: Rows, *, heads: int, width: int) -> Rows:
    """Split the heads: [N, heads · width] to [heads, N, width]."""
    split = writer.reshape(rows.value, -1, heads, width)
    return replace(rows, value=writer.transpose(split, 1, 0, 2))


def first_of(writer: Writer, rows: Rows, *, count: int) -> Rows:
    return replace(rows, value=writer.first(rows.value, end=count, axis=0))


def multiplied(writer: Writer, rows: Rows, weight: str) -> str:
    if not rows.step:
        return writer.op("MatMul", rows.value, weight)
    whole = writer.op("MatMulInteger", rows.value, weight, rows.zero)
    steps = writer.op("Mul", rows.step, f"{weight}.scale")
    return writer.op("Mul", writer.op("Cast", whole, to=TensorProto.FLOAT), steps)


def product(writer: Writer, x: str, weight: str) -> str:
    """Multiply rows with a matrix."""
    return multiplied(writer, rows_for(writer, x, weight), weight)
