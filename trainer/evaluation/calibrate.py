"""Fit the temperature under which a version's probabilities match its accuracy."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from model_store.records.quality import Calibration, CalibrationError
from trainer.evaluation.judged import Judged

FOLDS = 5
LOG_TEMPERATURES = (-3.0, 3.0)
PRIOR_DEVIATION = 0.5
"""Standard deviation of the log temperature around 0, so that a few right answers do not make a
version certain."""

DEVIATION_OF_ONE = 3.0
"""Standard error of a log temperature that was fitted on N images, times √N."""


def calibrate(
    judged: Judged, *, older: Collection[str], newest: Collection[str], fitted_on: int = 0
) -> Calibration:
    """Fit one temperature on all images, and measure the errors without and with it.

    The error of each image is measured with a temperature that was fitted on the other folds.
    `fitted_on` is the number of images that have given the logits a temperature already: the
    fewer held-out ones must not undo it (ADR 14).
    """
    if not len(judged.labels_N):
        return Calibration()
    deviation = PRIOR_DEVIATION
    if fitted_on:
        deviation = min(PRIOR_DEVIATION, DEVIATION_OF_ONE / math.sqrt(fitted_on))
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


def fit_temperature(judged: Judged, *, deviation: float = PRIOR_DEVIATION) -> float:
    """Find the temperature under which the labels are likeliest, nearer to 1 for few images."""
    low, high = LOG_TEMPERATURES
    for _ in range(4):  # each round searches a tenth of the range: 6 becomes 0.006
        points = np.linspace(low, high, 21)
        found = [negative_log_likelihood(judged, float(one), deviation=deviation) for one in points]
        best = points[int(np.argmin(found))]
        reach = (high - low) / 20
        low, high = best - reach, best + reach
    return float(np.exp((low + high) / 2))


def negative_log_likelihood(
    judged: Judged, log_temperature: float, *, deviation: float = PRIOR_DEVIATION
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
    folds_N[by_class] = np.arange(len(by_class)) % FOLDS
    temperatures_N = np.ones(len(folds_N))
    for fold in range(FOLDS):
        others = np.flatnonzero(folds_N != fold)
        if len(others):
            fitted = fit_temperature(judged.take(others), deviation=deviation)
            temperatures_N[folds_N == fold] = fitted
    return temperatures_N
