"""Run a network over labelled images, and measure its answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_store.inference.forward import FoldedNetwork
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing
from model_store.records.quality import SCORE_BOUNDS, CalibrationBin
from trainer.data.folders import LabelledImages
from trainer.tokens.passes import Floats, in_batches

CALIBRATION_BINS = 15
IMAGES_A_BIN = 20
"""The fewest images a bin: few images in many bins look badly calibrated."""


def calibration_bins(images: int) -> int:
    return min(CALIBRATION_BINS, max(1, images // IMAGES_A_BIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The logits of labelled images, and the measures that follow from them."""

    classes: tuple[str, ...]
    labels_N: NDArray[np.int64]
    logits_NC: Floats

    @property
    def right_N(self) -> NDArray[np.bool_]:
        return np.asarray(self.logits_NC.argmax(axis=1) == self.labels_N, dtype=np.bool_)

    def accuracy(self, among: Collection[str] | None = None) -> float | None:
        """Return the share of right answers; None without images."""
        chosen = self.right_N if among is None else self.right_N[self.is_of(among)]
        return float(chosen.mean()) if len(chosen) else None

    def per_class(self) -> dict[str, float]:
        accuracies = {name: self.accuracy({name}) for name in self.classes}
        return {name: value for name, value in accuracies.items() if value is not None}

    def confusion(self) -> dict[str, dict[str, int]]:
        """Count how often images of a class (outer) were taken for a class (inner); omit zeros."""
        table: dict[str, dict[str, int]] = {}
        pairs = np.stack([self.labels_N, self.logits_NC.argmax(axis=1)], axis=1)
        for (label, guess), count in zip(
            *np.unique(pairs, axis=0, return_counts=True), strict=True
        ):
            table.setdefault(self.classes[label], {})[self.classes[guess]] = int(count)
        return table

    def confidence_N(self, temperature: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of each image's answer."""
        scaled = (self.logits_NC.T.astype(np.float64) / temperature).T
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return np.asarray(weights.max(axis=1) / weights.sum(axis=1))

    def score_counts(self, *, temperature: float) -> tuple[int, ...]:
        """Count the images by the probability of their answer, in the bins of SCORE_BOUNDS."""
        bins = np.searchsorted(SCORE_BOUNDS, self.confidence_N(temperature))
        return tuple(np.bincount(bins, minlength=len(SCORE_BOUNDS) + 1).tolist())

    def calibration_error(
        self,
        *,
        temperature: float | NDArray[np.float64],
        among: Collection[str] | None = None,
    ) -> float | None:
        """Compute the expected calibration error: the gap between confidence and accuracy.

        Use 15 bins, or fewer where there are not 20 images for each. Every image may have a
        temperature of its own.
        """
        chosen = np.ones(len(self.labels_N), dtype=bool) if among is None else self.is_of(among)
        if not chosen.any():
            return None
        confidence = self.confidence_N(temperature)[chosen]
        right = self.right_N[chosen]
        count = calibration_bins(len(right))
        bins = np.minimum((confidence * count).astype(int), count - 1)
        gaps = [
            abs(float((right[bins == one] - confidence[bins == one]).sum())) for one in range(count)
        ]
        return sum(gaps) / len(right)

    def bins(self, temperature: float | NDArray[np.float64]) -> tuple[CalibrationBin, ...]:
        """Count the images and the right answers of each range of confidence that has any."""
        count = calibration_bins(len(self.labels_N))
        if not len(self.labels_N):
            return ()
        confidence_N = self.confidence_N(temperature)
        bin_N = np.minimum((confidence_N * count).astype(int), count - 1)
        return tuple(
            CalibrationBin(
                low=one / count,
                high=(one + 1) / count,
                images=int((bin_N == one).sum()),
                right=int(self.right_N[bin_N == one].sum()),
                # A mean of ones may be more than 1 by rounding.
                confidence=min(1.0, float(confidence_N[bin_N == one].mean())),
            )
            for one in np.unique(bin_N).tolist()
        )

    def take(self, rows: NDArray[np.int64]) -> Judged:
        return Judged(
            classes=self.classes, labels_N=self.labels_N[rows], logits_NC=self.logits_NC[rows]
        )

    def is_of(self, among: Collection[str]) -> NDArray[np.bool_]:
        """Mark the images of these classes."""
        places = [self.classes.index(name) for name in among]
        return np.isin(self.labels_N, places)


def judge(
    network: Network,
    images: LabelledImages,
    *,
    preprocessing: Preprocessing,
    retired: Collection[str] = (),
) -> Judged:
    folded = FoldedNetwork.of(network)
    logits = in_batches(network, images.pixels_NHWC, folded, preprocessing=preprocessing)
    return judged_by(logits, images, retired=retired)


def judged_by(
    logits_NC: Floats, images: LabelledImages, *, retired: Collection[str] = ()
) -> Judged:
    """Judge by logits. Those of retired classes become minus infinity: they are never answered."""
    if len(logits_NC):
        logits_NC[:, [images.classes.index(name) for name in retired]] = -np.inf
    return Judged(classes=images.classes, labels_N=images.labels_N, logits_NC=logits_NC)
