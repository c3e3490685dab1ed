"""Choose what computes embeddings of images by experts that are final: torch or onnxruntime."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.network.flops import folded_flops
from model_store.network.network import Network

if TYPE_CHECKING:  # onnxruntime may be missing
    from model_store.onnx.model import OnnxPrecision

Read = Callable[[Tensor], Tensor]
"""From images [N, 3, S, S] to embeddings [N, W]."""
LARGE_FLOP = 10**9
"""Operations of an image from which reading takes longer than starting onnxruntime, which was
never slower than torch here, and twice as fast on some processors. See ADR 103."""


def reader_of(network: Network, experts: Lineage) -> Read:
    """Read by the faster of torch and onnxruntime. `experts` are those of the network, folded."""
    if network.device.type != "cpu" or not has_onnxruntime():
        return experts.token
    if folded_flops(network.spec) < LARGE_FLOP:
        return experts.token
    return begun_late(lambda: read_in(network, "fp32"))


def has_onnxruntime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def begun_late(make: Callable[[], Read]) -> Read:
    """Make a reader with the first images: a session takes a second, and may not be needed."""
    made: list[Read] = []

    def read(images_BCHW: Tensor) -> Tensor:
        if not made:
            made.append(make())
        return made[0](images_BCHW)

    return read


def read_in(network: Network, precision: OnnxPrecision) -> Read:
    """Read by onnxruntime, with as many threads as torch has."""
    from model_store.onnx.model import HEADS, weights_of
    from model_store.onnx.session import Session

    weights = weights_of(network, precision=precision)
    experts = {name: arrays for name, arrays in weights.parts.items() if name != HEADS}
    session = Session(replace(weights, parts=experts), threads=torch.get_num_threads())
    return lambda images_BCHW: torch.from_numpy(session(images_BCHW.cpu().numpy()))
