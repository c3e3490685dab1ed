"""Measure how often a version answers the same in a reduced precision, before publishing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.doubt import Doubt
from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.precision import Trial
from model_store.precision import try_out as precision_try_out
from model_store.records.manifest import Preprocessing
from model_store.records.quality import Reduced
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import in_batches
from trainer.evaluation.judged import Judged

COMPARED: tuple[Reduced, ...] = ("int8", "bf16")
"""The precisions that a backend of the server computes in."""
REDUCED_BATCH = 16
"""The default batch limit of servers: 8-bit rows share a scale in a batch."""
MAX_IMAGES = 1000
MIN_SPEEDUP = 0.5
"""The least speed-up: a precision that this machine only imitates could outlast the training."""

Floats = NDArray[np.float32]
Read = Callable[[Tensor], Tensor]
"""From images to tokens."""


class ReadTokens(Protocol):
    """A reader of tokens in a reduced precision, which may know some of them already."""

    def __call__(
        self, precision: Reduced, make: Callable[[], Read], images: LabelledImages
    ) -> Floats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The rule for unknown images by the token, where a version has one."""

    doubt: Doubt
    threshold: float

    def unknown_N(self, token_NW: Floats) -> NDArray[np.bool_]:
        return np.asarray(self.doubt.log_odds(token_NW) < self.threshold)


def agreement_of(
    network: Network,
    *,
    images: LabelledImages,
    judged: Judged,
    preprocessing: Preprocessing,
    token_NW: Floats | None = None,
    verdict: Verdict | None = None,
    try_out: Callable[[Reduced], Trial] | None = None,
    read_tokens: ReadTokens | None = None,
) -> dict[Reduced, float]:
    """Measure the share of `images` whose answer is that of `judged`, in each precision that runs
    here. With a `verdict` on `token_NW`, the oldest slices of the tokens in single precision, an
    answer is the same if both call the image unknown or neither does. Return nothing without
    images."""
    if not len(images):
        return {}
    rows_N = np.unique(np.linspace(0, len(images) - 1, MAX_IMAGES).astype(np.int64))
    answers_N = judged.logits_NC[rows_N].argmax(axis=1)
    unknown_N = None
    if verdict is not None and token_NW is not None:
        unknown_N = verdict.unknown_N(token_NW[rows_N])
    retired_C = np.isneginf(judged.logits_NC).all(axis=0)
    trying = try_out or partial(precision_try_out, device=network.device.type)
    found: dict[Reduced, float] = {}
    for precision in COMPARED:
        if not _is_worth_it(precision, try_out=trying):
            continue
        make = partial(_in_int8 if precision == "int8" else _in_bf16, network)
        chosen = images.take(rows_N)
        reduced_NW = (
            in_batches(
                network,
                chosen.pixels_NHWC,
                make(),
                preprocessing=preprocessing,
                batch_size=REDUCED_BATCH,
            )
            if read_tokens is None
            else read_tokens(precision, make, chosen)
        )
        logits_NC = _classified(network, reduced_NW)
        same_N = np.where(retired_C, -np.inf, logits_NC).argmax(axis=1) == answers_N
        if verdict is not None and unknown_N is not None:
            width = network.spec.doubt_width
            same_N &= verdict.unknown_N(reduced_NW[:, :width]) == unknown_N
        found[precision] = float(same_N.mean())
    return found


def _is_worth_it(precision: Reduced, *, try_out: Callable[[Reduced], Trial]) -> bool:
    """Return whether a precision runs here, and does not take too long."""
    if precision == "int8" and importlib.util.find_spec("onnxruntime") is None:
        return False
    trial = try_out(precision)
    return trial.runs and trial.speedup >= MIN_SPEEDUP


def _classified(network: Network, token_NW: Floats) -> Floats:
    """Compute logits. Both backends classify in single precision."""
    with torch.inference_mode():
        token = torch.from_numpy(token_NW).to(network.device)
        logits: Floats = network.classify([token]).cpu().numpy()
    return logits


def _in_int8(network: Network) -> Read:
    from model_store.onnx.model import HEADS, Weights, weights_of
    from model_store.onnx.session import Session

    weights = weights_of(network, precision="int8")
    experts = {name: arrays for name, arrays in weights.parts.items() if name != HEADS}
    session = Session(Weights(spec=weights.spec, parts=experts), threads=None)
    return lambda images: torch.from_numpy(session(images.cpu().numpy()))


def _in_bf16(network: Network) -> Read:
    return FoldedNetwork.of(network, matmul_dtype=torch.bfloat16).lineage.token
