"""Run a network over labelled images, measure its answers, fit the temperature under which its
probabilities match its accuracy, and choose the answers that a report shows."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.records.manifest import Preprocessing
from model_store.records.quality import (
    MAX_SHOWN,
    SCORE_BOUNDS,
    Calibration,
    CalibrationBin,
    CalibrationError,
    JudgedImage,
)
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import Floats, in_batches
from trainer.embeddings.reading import reader_of

_CALIBRATION_BINS = 15
IMAGES_A_BIN = 20
"""The fewest images a bin: few images in many bins look badly calibrated."""


def _calibration_bins(images: int) -> int:
    return min(_CALIBRATION_BINS, max(1, images // IMAGES_A_BIN))


def _binned(confidence_N: NDArray[np.float64]) -> list[NDArray[np.bool_]]:
    """Mark the images of each bin of confidence."""
    count = _calibration_bins(len(confidence_N))
    bin_N = np.minimum((confidence_N * count).astype(int), count - 1)
    return [bin_N == one for one in range(count)]


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
        gaps = [abs(float((right[rows] - confidence[rows]).sum())) for rows in _binned(confidence)]
        return sum(gaps) / len(right)

    def chance_calibration_error(self, *, temperature: float) -> float | None:
        """Estimate the calibration error of answers that are right as often as they say.

        In few images as many are seldom right as there should be, so it is not 0.
        """
        if not len(self.labels_N):
            return None
        confidence_N = self.confidence_N(temperature)
        variance_N = confidence_N * (1 - confidence_N)
        # The mean of |x| of a normal distribution is its deviation times √(2/π).
        gaps = [math.sqrt(2 / math.pi * variance_N[rows].sum()) for rows in _binned(confidence_N)]
        return sum(gaps) / len(confidence_N)

    def bins(self, temperature: float | NDArray[np.float64]) -> tuple[CalibrationBin, ...]:
        """Count the images and the right answers of each range of confidence that has any."""
        count = _calibration_bins(len(self.labels_N))
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
    read = reader_of(network, Lineage.of(network))
    logits = in_batches(
        network,
        images.pixels_NHWC,
        lambda images_BCHW: network.classify([read(images_BCHW)]),
        preprocessing=preprocessing,
    )
    return judged_by(logits, images, retired=retired)


def judged_by(
    logits_NC: Floats, images: LabelledImages, *, retired: Collection[str] = ()
) -> Judged:
    """Judge by logits. Those of retired classes become minus infinity: they are never answered."""
    if len(logits_NC):
        logits_NC[:, [images.classes.index(name) for name in retired]] = -np.inf
    return Judged(classes=images.classes, labels_N=images.labels_N, logits_NC=logits_NC)


_MOST_WORSE = 12
"""Images that the parent had right and this version has wrong."""
_MOST_BETTER = 6
"""Images that this version has right and the parent had wrong."""


def choose_shown(
    judged: Judged, parent: Judged | None, *, older: Collection[str], temperature: float
) -> tuple[JudgedImage, ...]:
    """List images by their class and number, so that no pixel is copied: the most confident ones
    of those that got worse, of those that got better, and then of all other wrong answers."""
    images = _all_told(judged, parent, older=older, temperature=temperature)
    images.sort(key=lambda one: -one.confidence)
    worse = [image for image in images if image.before == image.class_name != image.answer]
    better = [image for image in images if image.answer == image.class_name]
    first = [*worse[:_MOST_WORSE], *better[:_MOST_BETTER]]
    rest = [image for image in images if image.answer != image.class_name and image not in first]
    return (*first, *rest[: MAX_SHOWN - len(first)])


def _all_told(
    judged: Judged, parent: Judged | None, *, older: Collection[str], temperature: float
) -> list[JudgedImage]:
    """Describe every image with a wrong answer, or with another one than the parent's."""
    if not len(judged.labels_N):
        return []
    classes, known = judged.classes, set(older)
    confidence_N = judged.confidence_N(temperature)
    answer_N = judged.logits_NC.argmax(axis=1)
    before_N = None if parent is None else parent.logits_NC.argmax(axis=1)
    seen = np.zeros(len(classes), dtype=np.int64)
    found = []
    for row, label in enumerate(judged.labels_N.tolist()):
        image, name = int(seen[label]), classes[label]
        seen[label] += 1
        before = classes[before_N[row]] if before_N is not None and name in known else None
        answer = classes[answer_N[row]]
        if answer == name and before in (None, name):
            continue
        # A probability may be more than 1 by rounding.
        confidence = min(1.0, float(confidence_N[row]))
        found.append(
            JudgedImage(
                class_name=name, image=image, answer=answer, before=before, confidence=confidence
            )
        )
    return found


_CALIBRATION_FOLDS = 5
_LOG_TEMPERATURES = (-3.0, 3.0)
_PRIOR_DEVIATION = 0.5
"""Standard deviation of the log temperature around 0, so that a few right answers do not make a
version certain."""

_DEVIATION_OF_ONE = 3.0
"""Standard error of a log temperature that was fitted on N images, times √N."""


def calibrate(
    judged: Judged,
    *,
    older: Collection[str],
    newest: Collection[str],
    fitted_on: int = 0,
    together: float = 1.0,
) -> Calibration:
    """Fit one temperature on all images, and measure the errors without and with it.

    The error of each image is measured with a temperature that was fitted on the other folds.
    `fitted_on` is the number of images that have given the logits a temperature already: the
    fewer held-out ones must not undo it (ADR 14). `together` is the number of images of a group
    that belong together, on average: they tell as much as one image.
    """
    if not len(judged.labels_N):
        return Calibration()
    deviation = _PRIOR_DEVIATION
    if fitted_on:
        deviation = min(_PRIOR_DEVIATION, _DEVIATION_OF_ONE / math.sqrt(fitted_on))
    deviation /= math.sqrt(together)  # as if the likelihood of a group was that of one image
    crossed_N = _cross_fitted(judged, deviation=deviation)

    def errors(temperature: float | NDArray[np.float64]) -> CalibrationError:
        return CalibrationError(
            all=judged.calibration_error(temperature=temperature),
            old=judged.calibration_error(temperature=temperature, among=older),
            new=judged.calibration_error(temperature=temperature, among=newest),
        )

    return Calibration(
        temperature=fit_temperature(judged, deviation=deviation),
        before=errors(1.0),
        after=errors(crossed_N),
        images=len(judged.labels_N),
        bins=judged.bins(crossed_N),
    )


def fit_temperature(judged: Judged, *, deviation: float = _PRIOR_DEVIATION) -> float:
    """Find the temperature under which the labels are likeliest, nearer to 1 for few images."""
    low, high = _LOG_TEMPERATURES
    for _ in range(4):  # each round searches a tenth of the range: 6 becomes 0.006
        points = np.linspace(low, high, 21)
        found = [
            negative_log_likelihood(judged, float(point), deviation=deviation) for point in points
        ]
        best = points[int(np.argmin(found))]
        reach = (high - low) / 20
        low, high = best - reach, best + reach
    return float(np.exp((low + high) / 2))


def negative_log_likelihood(
    judged: Judged, log_temperature: float, *, deviation: float = _PRIOR_DEVIATION
) -> float:
    """Sum the negative log-likelihoods of the labels and, under its prior, of the temperature."""
    scaled = judged.logits_NC.astype(np.float64) / np.exp(log_temperature)
    top_N = scaled.max(axis=1)
    log_sum_N = top_N + np.log(np.exp(scaled - top_N[:, None]).sum(axis=1))
    of_label_N = scaled[np.arange(len(scaled)), judged.labels_N]
    prior = 0.5 * (log_temperature / deviation) ** 2
    return float((log_sum_N - of_label_N).sum() + prior)


def _cross_fitted(judged: Judged, *, deviation: float) -> NDArray[np.float64]:
    """Fit for each image a temperature on the other folds; every fold has all classes."""
    folds_N = np.zeros(len(judged.labels_N), dtype=np.int64)
    by_class = np.argsort(judged.labels_N, kind="stable")
    folds_N[by_class] = np.arange(len(by_class)) % _CALIBRATION_FOLDS
    temperatures_N = np.ones(len(folds_N))
    for fold in range(_CALIBRATION_FOLDS):
        others = np.flatnonzero(folds_N != fold)
        if len(others):
            fitted = fit_temperature(judged.take(others), deviation=deviation)
            temperatures_N[folds_N == fold] = fitted
    return temperatures_N
