"""How right the advice on a version is: forecasts of more images, and label errors that it finds.

`python -m benchmarks.learning.advice --cifar cifar100.zip --pretrained FILE` takes 20 classes of
CIFAR-100, with 100 training and 100 test images each.

*Forecasts*: of a draw of images, the advice says what so many more images of one class would add
to the accuracy of that class. The images are then really added to that class, the classifier is
fitted again as `add-task` does, and test images tell what they brought; one class at a time.
*Label errors*: the labels of 5 % of the images are changed, to any other class or to the class that
they look most like; the advice puts all images into an order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Figure, at_least, at_most, print_figures
from benchmarks.learning.advice_tokens import Read, read_cifar
from trainer.advice.advise import doubt_labels, gain, slopes
from trainer.advice.left_out import leave_out
from trainer.fitting.choice import TOLERANCE_TO_CHOOSE, choose
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Linear, Problem, variance_of
from trainer.learning.losses import cross_entropy

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]

CLASSES, TRAIN, TEST = 20, 100, 100
ADDED = ((10, 10), (20, 10), (20, 20), (40, 20), (40, 40))
"""Images that a class has, and images that are added."""
MISLABELLED = 0.05
LOOKED_AT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Forecast and real gains of all classes, as shares."""

    forecast_C: Doubles
    real_C: Doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Shares: of planted errors that are among the first, of labels that are suspected, and of
    these that were planted."""

    found: float
    suspected: float
    planted: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", type=Path, required=True, help="cifar100.zip")
    parser.add_argument("--pretrained", type=Path, required=True, help="the vision transformer")
    parser.add_argument("--draws", type=int, default=6, help="choices of images")
    parser.add_argument("--seed", type=int, default=0, help="of the classes")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    read = read_cifar(
        options.cifar,
        pretrained=options.pretrained,
        classes=CLASSES,
        train=TRAIN,
        test=TEST,
        seed=options.seed,
    )
    measured: dict[str, float] = {}
    figures = [
        *measure_forecasts(read, draws=options.draws, measured=measured),
        *measure_label_errors(read, draws=options.draws, measured=measured),
    ]
    measured["processor seconds for 25 classes of 200 images"] = _cost_s(read)
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure_forecasts(read: Read, *, draws: int, measured: dict[str, float]) -> list[Figure]:
    """Compare forecasts with what images brought, for each class and draw."""
    errors, averaged, guesses = [], [], []
    for images, more in ADDED:
        found = [_draw(read, images=images, more=more, seed=seed) for seed in range(draws)]
        forecast_DC = 100 * np.stack([one.forecast_C for one in found])
        real_DC = 100 * np.stack([one.real_C for one in found])
        name = f"{images} images and {more} more"
        print(name, file=sys.stderr, flush=True)
        measured[f"{name}: brought (points)"] = float(real_DC.mean())
        measured[f"{name}: forecast (points)"] = float(forecast_DC.mean())
        measured[f"{name}: mean absolute error"] = _apart(forecast_DC, real_DC)
        measured[f"{name}: of a forecast of 0"] = _apart(np.zeros_like(real_DC), real_DC)
        by_class = forecast_DC.mean(axis=0), real_DC.mean(axis=0)
        measured[f"{name}: by class, over the draws"] = _apart(*by_class)
        measured[f"{name}: by class, of a forecast of 0"] = float(np.abs(by_class[1]).mean())
        measured[f"{name}: by class, correlation"] = float(np.corrcoef(*by_class)[0, 1])
        errors.append(measured[f"{name}: mean absolute error"])
        averaged.append(measured[f"{name}: by class, over the draws"])
        guesses.append(measured[f"{name}: of a forecast of 0"])
    measured["mean absolute error by class, over the draws"] = float(np.mean(averaged))
    measured["mean absolute error of a forecast of 0"] = float(np.mean(guesses))
    return [at_most("forecasts: mean absolute error (points)", float(np.mean(errors)), 3.0)]


def measure_label_errors(read: Read, *, draws: int, measured: dict[str, float]) -> list[Figure]:
    """Count planted errors among the first tenth of the list."""
    for kind in ("any class", "the nearest class"):
        for images in (20, 40, TRAIN):
            found = [
                _found(read, images=images, nearest=kind != "any class", seed=seed)
                for seed in range(draws)
            ]
            row = f"{images} images a class, to {kind}"
            measured[f"label errors found, {row}"] = float(np.mean([one.found for one in found]))
            measured[f"suspected labels, {row}"] = float(np.mean([one.suspected for one in found]))
            measured[f"suspected labels that were planted, {row}"] = float(
                np.mean([one.planted for one in found])
            )
    hardest = [value for name, value in measured.items() if name.startswith("label errors found")]
    any_class = [
        value
        for name, value in measured.items()
        if name.startswith("label errors found") and name.endswith("to any class")
    ]
    return [
        at_least("planted label errors found, to any class", min(any_class), 0.7),
        at_least("planted label errors found, the hardest row", min(hardest), 0.7),
    ]


def _draw(read: Read, *, images: int, more: int, seed: int) -> Draw:
    drawn = np.random.default_rng(seed)
    orders = [drawn.permutation(np.flatnonzero(read.train_N == one)) for one in range(CLASSES)]
    rows = np.concatenate([order[:images] for order in orders])
    tokens_NW, labels_N = read.train_NW[rows].astype(np.float64), read.train_N[rows]
    left_out = leave_out(tokens_NW, labels_N, may_judge_N=np.ones(len(rows), dtype=bool))
    assert left_out is not None
    slope_C = slopes(left_out.sizes_CS, left_out.errors_CS)
    forecast = [
        gain(float(slope), error=float(error), images=images, more=more)
        for slope, error in zip(slope_C, left_out.errors_CS[:, -1], strict=True)
    ]
    brought = _brought(read, rows, [order[images : images + more] for order in orders])
    return Draw(forecast_C=np.array(forecast), real_C=np.array(list(brought)))


def _brought(read: Read, rows: Labels, added: list[Labels]) -> Iterator[float]:
    """Add images of one class after the other, and see the accuracy of that class rise."""
    problem = _problem(read, rows)
    penalty = choose(problem, methods=("logistic",)).choice.strength
    before = _solved(problem, penalty)
    for place, extra in enumerate(added):
        after = _solved(_problem(read, np.concatenate([rows, extra])), penalty, near=before)
        yield _right(read, after, place) - _right(read, before, place)


def _solved(problem: Problem, penalty: float, *, near: Linear | None = None) -> Linear:
    """Fit with the tolerance of cross-validation, before and after alike."""
    l2_penalty = penalty * variance_of(problem)
    return solve(problem, l2_penalty=l2_penalty, near=near, tolerance=TOLERANCE_TO_CHOOSE)


def _problem(read: Read, rows: Labels) -> Problem:
    return Problem(
        tokens_NW=torch.from_numpy(read.train_NW[rows]).double(),
        labels_N=torch.from_numpy(read.train_N[rows]),
        count=CLASSES,
        loss=cross_entropy,
    )


def _right(read: Read, linear: Linear, place: int) -> float:
    weight_CW, bias_C = linear
    tokens = torch.from_numpy(read.test_NW[read.test_N == place]).double()
    return float(((tokens @ weight_CW.T + bias_C).argmax(dim=1) == place).double().mean())


def _found(read: Read, *, images: int, nearest: bool, seed: int) -> Found:
    drawn = np.random.default_rng(seed)
    rows = np.concatenate(
        [drawn.permutation(np.flatnonzero(read.train_N == one))[:images] for one in range(CLASSES)]
    )
    tokens_NW, labels_N = read.train_NW[rows].astype(np.float64), read.train_N[rows]
    every_N = np.ones(len(rows), dtype=bool)
    wrong = drawn.permutation(len(rows))[: round(MISLABELLED * len(rows))]
    planted_N = labels_N.copy()
    planted_N[wrong] = (labels_N[wrong] + drawn.integers(1, CLASSES, len(wrong))) % CLASSES
    if nearest:
        truth = leave_out(tokens_NW, labels_N, may_judge_N=every_N)
        assert truth is not None
        others_NC = truth.logits_NC.copy()
        others_NC[np.arange(len(rows)), labels_N] = -np.inf
        planted_N[wrong] = others_NC[wrong].argmax(axis=1)
    left_out = leave_out(tokens_NW, planted_N, may_judge_N=every_N)
    assert left_out is not None
    doubted = doubt_labels(left_out, planted_N)
    first = doubted.rows_M[: round(LOOKED_AT * len(rows))]
    suspects = doubted.rows_M[doubted.suspected_M]
    return Found(
        found=float(np.isin(wrong, first).mean()),
        suspected=len(suspects) / len(rows),
        planted=float(np.isin(suspects, wrong).mean()),
    )


def _apart(one: Doubles, other: Doubles) -> float:
    return float(np.abs(one - other).mean())


def _cost_s(read: Read) -> float:
    """Take the processor time of the study of 5,000 images, each one a little apart."""
    drawn = np.random.default_rng(0)
    rows = drawn.integers(0, len(read.train_N), 5000)
    tokens_NW = read.train_NW[rows] + drawn.normal(scale=0.01, size=(5000, read.train_NW.shape[1]))
    labels_N = np.arange(5000) % 25
    began = time.process_time()
    left_out = leave_out(tokens_NW, labels_N, may_judge_N=np.ones(5000, dtype=bool))
    assert left_out is not None
    doubt_labels(left_out, labels_N)
    return time.process_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
