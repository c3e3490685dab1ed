"""Measure how often a version answers the same in a reduced precision, before publishing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.precision import Trial
from model_store.precision import try_out as precision_try_out
from model_store.preprocess import normalise
from model_store.records.manifest import Preprocessing
from model_store.records.quality import Reduced
from trainer.data.folders import LabelledImages
from trainer.evaluation.judged import Judged

COMPARED: tuple[Reduced, ...] = ("int8", "bf16")
"""The precisions that a backend of the server computes in."""
BATCH = 16
"""The default batch limit of servers: 8-bit rows share a scale in a batch."""
MAX_IMAGES = 1000
MIN_SPEEDUP = 0.5
"""The least speed-up: a precision that this machine only imitates could outlast the training."""

Floats = NDArray[np.float32]
Forward = Callable[[Floats], Floats]


def agreement_of(
    network: Network,
    *,
    images: LabelledImages,
    judged: Judged,
    preprocessing: Preprocessing,
    try_out: Callable[[Reduced], Trial] | None = None,
) -> dict[Reduced, float]:
    """Measure the share of `images` whose answer is that of `judged`, in each precision that runs
    here. Return nothing without images."""
    if not len(images):
        return {}
    rows_N = np.unique(np.linspace(0, len(images) - 1, MAX_IMAGES).astype(np.int64))
    answers_N = judged.logits_NC[rows_N].argmax(axis=1)
    retired_C = np.isneginf(judged.logits_NC).all(axis=0)
    trying = try_out or partial(precision_try_out, device=network.device.type)
    found: dict[Reduced, float] = {}
    for precision in COMPARED:
        forward = _forward(network, precision, try_out=trying)
        if forward is not None:
            same = 0
            for start in range(0, len(rows_N), BATCH):
                chosen = slice(start, start + BATCH)
                batch = normalise(images.pixels_NHWC[rows_N[chosen]], preprocessing)
                logits = np.where(retired_C, -np.inf, forward(batch))
                same += int((logits.argmax(axis=1) == answers_N[chosen]).sum())
            found[precision] = same / len(rows_N)
    return found


def _forward(
    network: Network, precision: Reduced, *, try_out: Callable[[Reduced], Trial]
) -> Forward | None:
    """Prepare the network in a precision; None where it does not run here or takes too long."""
    if precision == "int8" and importlib.util.find_spec("onnxruntime") is None:
        return None
    trial = try_out(precision)
    if not trial.runs or trial.speedup < MIN_SPEEDUP:
        return None
    return _in_int8(network) if precision == "int8" else _in_bf16(network)


def _in_int8(network: Network) -> Forward:
    from model_store.onnx.model import weights_of
    from model_store.onnx.session import Session

    return Session(weights_of(network, precision="int8"), threads=None)


def _in_bf16(network: Network) -> Forward:
    folded = FoldedNetwork.of(network, matmul_dtype=torch.bfloat16)

    def forward(images: Floats) -> Floats:
        with torch.inference_mode():
            logits: Floats = folded(torch.from_numpy(images).to(network.device)).cpu().numpy()
        return logits

    return forward
