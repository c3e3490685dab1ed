"""Measure how near the answers of a version in a reduced precision are, before publishing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.inference.doubt import Doubt, none_of_these
from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.precision import Trial
from model_store.precision import try_out as precision_try_out
from model_store.records.manifest import Preprocessing
from model_store.records.quality import Reduced
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import in_batches
from trainer.embeddings.reading import Read, has_onnxruntime, read_in
from trainer.evaluation.gate import SIGNIFICANCE, count_flips, sign_test
from trainer.evaluation.judged import Judged

_COMPARED: tuple[Reduced, ...] = ("int8", "bf16")
"""The precisions that a backend of the server computes in."""
FORMS: Mapping[Reduced, str] = {"int8": "int8, row by row", "bf16": "bf16"}
"""The names of kept embeddings: other ones where the computation of a precision changes."""
MAX_IMAGES = 1000
MIN_SPEEDUP = 0.5
"""The least speed-up: a precision that this machine only imitates could outlast the training."""

Floats = NDArray[np.float32]


class ReadEmbeddings(Protocol):
    """A reader of embeddings in a reduced precision, which may know some of them already."""

    def __call__(
        self, precision: Reduced, make: Callable[[], Read], images: LabelledImages
    ) -> Floats: ...


def agreement_of(
    network: Network,
    *,
    images: LabelledImages,
    judged: Judged,
    preprocessing: Preprocessing,
    temperature: float = 1.0,
    embeddings_NW: Floats | None = None,
    doubt: Doubt | None = None,
    try_out: Callable[[Reduced], Trial] | None = None,
    read_embeddings: ReadEmbeddings | None = None,
) -> dict[Reduced, float]:
    """Measure how near the answers of each precision that runs here are to those of `judged`.

    The agreement is 1 less the mean distance of the calibrated probabilities of `images`, and 0 if
    the precision is less accurate than chance explains. With a `doubt` on `embeddings_NW`, the
    oldest slices in single precision, an image is as far apart as its probability to be unknown is,
    if that is more. Return nothing without images.
    """
    if not len(images):
        return {}
    rows_N = np.unique(np.linspace(0, len(images) - 1, MAX_IMAGES).astype(np.int64))
    whole, chosen = judged.take(rows_N), images.take(rows_N)
    retired_C = np.isneginf(judged.logits_NC).all(axis=0)
    trying = try_out or partial(precision_try_out, device=network.device.type)
    found: dict[Reduced, float] = {}
    for precision in _COMPARED:
        if not _is_worth_it(precision, try_out=trying):
            continue
        make = (
            partial(read_in, network, "int8") if precision == "int8" else partial(_in_bf16, network)
        )
        reduced_NW = (
            in_batches(
                network,
                chosen.pixels_NHWC,
                make(),
                preprocessing=preprocessing,
            )
            if read_embeddings is None
            else read_embeddings(precision, make, chosen)
        )
        logits_NC = np.where(retired_C, -np.inf, _classified(network, reduced_NW))
        apart_N = distances(whole.logits_NC, logits_NC, temperature=temperature)
        if doubt is not None and embeddings_NW is not None:
            width = network.spec.doubt_width
            unknown_N = _none_of_these(doubt, embeddings_NW[rows_N])
            apart_N = np.maximum(
                apart_N, np.abs(_none_of_these(doubt, reduced_NW[:, :width]) - unknown_N)
            )
        found[precision] = 1 - float(apart_N.mean())
        if _is_less_accurate(whole, replace(whole, logits_NC=logits_NC)):
            found[precision] = 0.0
    return found


def distances(logits_NC: Floats, others_NC: Floats, *, temperature: float) -> NDArray[np.float64]:
    """Compute the total variation distance of each image's probabilities, between 0 and 1: the
    most by which the probability of any set of classes differs."""

    def probabilities(given_NC: Floats) -> NDArray[np.float64]:
        scaled = (given_NC - given_NC.max(axis=1, keepdims=True)).astype(np.float64) / temperature
        weights = np.exp(scaled)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    apart_NC = np.abs(probabilities(logits_NC) - probabilities(others_NC))
    return np.asarray(apart_NC.sum(axis=1) / 2)


def _none_of_these(doubt: Doubt, embeddings_NW: Floats) -> NDArray[np.float64]:
    """Compute the probability that each image is unknown."""
    return np.array([none_of_these(float(one)) for one in doubt.log_odds(embeddings_NW)])


def _is_less_accurate(whole: Judged, reduced: Judged) -> bool:
    worse, better = count_flips(whole, reduced)
    return sign_test(worse=worse, better=better) <= SIGNIFICANCE


def _is_worth_it(precision: Reduced, *, try_out: Callable[[Reduced], Trial]) -> bool:
    """Return whether a precision runs here, and does not take too long."""
    if precision == "int8" and not has_onnxruntime():
        return False
    trial = try_out(precision)
    return trial.runs and trial.speedup >= MIN_SPEEDUP


def _classified(network: Network, embeddings_NW: Floats) -> Floats:
    """Compute logits. Both backends classify in single precision."""
    with torch.inference_mode():
        embedding = torch.from_numpy(embeddings_NW).to(network.device)
        logits: Floats = network.classify([embedding]).cpu().numpy()
    return logits


def _in_bf16(network: Network) -> Read:
    return FoldedNetwork.of(network, matmul_dtype=torch.bfloat16).lineage.token
