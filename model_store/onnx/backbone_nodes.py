"""Write the nodes that only a pre-trained first expert has: see `network/backbone.py`.

Shapes: B images, P positions, H attention heads, D channels of an attention head.
"""

from __future__ import annotations

import numpy as np

from model_store.network.backbone import QUICK
from model_store.onnx.writer import Writer
from model_store.spec import Activation


def activated(writer: Writer, x: str, kind: Activation) -> str:
    """Apply the function between two linear layers."""
    if kind == "gelu":
        return writer.op("Gelu", x)
    if kind == "tanh-gelu":
        return writer.op("Gelu", x, approximate="tanh")
    if kind == "quick-gelu":
        quick = writer.constant(np.asarray(QUICK, dtype=np.float32))
        return writer.op("Mul", x, writer.op("Sigmoid", writer.op("Mul", x, quick)))
    gate, value = writer.split(x, parts=2, axis=-1)
    return writer.op("Mul", writer.op("Mul", gate, writer.op("Sigmoid", gate)), value)


def standardised(writer: Writer, hidden_NE: str, *, channels: int, of: int, eps: float) -> str:
    """Standardise the first channels, and put zeros after them."""
    first = writer.first(hidden_NE, end=channels, axis=1)
    normed = writer.normalised(first, width=channels, eps=eps)
    return writer.op("Pad", normed, writer.integers(0, of - channels), "", writer.integers(1))


def turned(writer: Writer, x_BHPD: str, norm: str, *, eps: float) -> str:
    """Normalise and turn queries or keys, as far as the weights for it are declared."""
    if writer.has(f"{norm}.weight"):
        x_BHPD = writer.op(
            "LayerNormalization",
            x_BHPD,
            f"{norm}.weight",
            f"{norm}.bias",
            axis=-1,
            epsilon=eps,
        )
    if not writer.has("experts.0.turn.cos"):
        return x_BHPD
    first, second = writer.split(x_BHPD, parts=2, axis=-1)
    swapped = writer.op("Concat", second, first, axis=-1)
    straight = writer.op("Mul", x_BHPD, "experts.0.turn.cos")
    return writer.op("Add", straight, writer.op("Mul", swapped, "experts.0.turn.sin"))
