"""Compare classifiers on tokens of a frozen backbone: accuracy, calibration and seconds.

`python -m benchmarks.learning.heads TOKENS.npz` reads `train_x` [N, W], `train_y`, `test_x` and
`test_y`. With `--store DIR --data DIR --test DIR` it makes them, through the first expert of the
version that the channel names. Three tables follow: all classes at once, by the number of images
and classes; uneven classes; five tasks of five classes, with exemplars or statistics.

N images, W channels, C classes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.codec import load_network
from model_store.inference.forward import Lineage
from model_store.store.store import Store
from trainer.data.folders import list_classes, read_images
from trainer.embeddings.cache import in_batches
from trainer.embeddings.statistics import accumulate, gather
from trainer.evaluation.judged import Judged, fit_temperature, negative_log_likelihood
from trainer.fitting.choice import choose
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Problem, variance_of
from trainer.learning.losses import cross_entropy
from trainer.progress import show_progress

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Linear = tuple[Floats, Floats]
"""Weight [C, W] and bias [C]."""
Answers = Callable[[Floats], Floats]
"""Give the calibrated logits [N, C] of tokens."""

FOLDS = 5
RIDGES = tuple(10.0**power for power in np.arange(-4, 2.1, 0.5))
PROJECTED = 2000
SHRINKAGES = (0.9, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.003)
TASKS, A_TASK, A_CLASS = 5, 5, 40
AT_ONCE = "all images at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens and labels of the classes 0 to `classes` - 1."""

    tokens_NW: Floats
    labels_N: Labels
    classes: int

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Tokens:
        return Tokens(
            tokens_NW=self.tokens_NW[rows], labels_N=self.labels_N[rows], classes=self.classes
        )

    def only(self, chosen: Sequence[int], counts: Sequence[int] | None = None) -> Tokens:
        """Keep these classes, under new numbers, and the first `counts` images of each."""
        rows, labels = [], []
        for place, one in enumerate(chosen):
            found = np.flatnonzero(self.labels_N == one)[: counts[place] if counts else None]
            rows.append(found)
            labels.append(np.full(len(found), place))
        return Tokens(
            tokens_NW=self.tokens_NW[np.concatenate(rows)],
            labels_N=np.concatenate(labels),
            classes=len(chosen),
        )

    def judged(self, logits_NC: Floats) -> Judged:
        return Judged(
            classes=tuple(map(str, range(self.classes))),
            labels_N=self.labels_N,
            logits_NC=logits_NC.astype(np.float32),
        )

    @property
    def problem(self) -> Problem:
        return Problem(
            tokens_NW=torch.from_numpy(self.tokens_NW),
            labels_N=torch.from_numpy(self.labels_N),
            count=self.classes,
            loss=cross_entropy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    accuracy: float
    calibration_error: float
    seconds: float


def logistic(seen: Tokens) -> Answers:
    """Fit as `add-task` does where every image is at hand."""
    return _logistic(seen)


def _logistic(seen: Tokens, *, judged: NDArray[np.bool_] | None = None) -> Answers:
    problem = seen.problem
    fitted = choose(
        problem,
        judged_N=None if judged is None else torch.from_numpy(judged),
        methods=("logistic",),
    ).choice
    weight, bias = solve(problem, l2_penalty=fitted.strength * variance_of(problem))
    return _linear((weight.numpy() / fitted.temperature, bias.numpy() / fitted.temperature))


def from_statistics(seen: Tokens, *, images: Tokens) -> Answers:
    """Fit as `add-task` does: to `seen`, and to stand-ins for the other `images` of its classes."""
    known = {
        str(one): accumulate(images.tokens_NW[images.labels_N == one])
        for one in range(images.classes)
    }
    gathered = gather(
        seen.tokens_NW.astype(np.float32),
        seen.labels_N,
        classes=list(known),
        new=0,
        width=seen.tokens_NW.shape[1],
        known=known,
    )
    found = Tokens(
        tokens_NW=gathered.embeddings_NV.astype(np.float64),
        labels_N=gathered.labels_N,
        classes=images.classes,
    )
    return _logistic(found, judged=gathered.real_N)


def discriminant(seen: Tokens) -> Answers:
    """Fit linear discriminant analysis, with a covariance that is shrunk to a sphere."""

    def fit(part: Tokens) -> list[Answers]:
        each = [accumulate(part.tokens_NW[part.labels_N == one]) for one in range(part.classes)]
        means = np.stack([one.mean_W for one in each])
        middle = means.mean(axis=0)
        apart = means - middle
        scatter = np.sum([one.scatter_WW for one in each], axis=0)
        freedom = max(1, len(part.labels_N) - part.classes)
        variances, axes = np.linalg.eigh(scatter / freedom)
        mean = float(variances.mean())

        def answers(shrinkage: float) -> Answers:
            inverse = (axes / ((1 - shrinkage) * variances + shrinkage * mean)) @ axes.T
            weight = apart @ inverse
            bias = -0.5 * (weight * apart).sum(axis=1)
            return lambda tokens: (tokens - middle) @ weight.T + bias

        return [answers(one) for one in SHRINKAGES]

    return _chosen(seen, fit)


def nearest_mean(seen: Tokens) -> Answers:
    """Answer by the cosine to class means."""

    def fit(part: Tokens) -> list[Answers]:
        unit = _unit(part.tokens_NW)
        means = np.stack([unit[part.labels_N == one].mean(axis=0) for one in range(part.classes)])
        return [lambda tokens: 10 * _unit(tokens) @ _unit(means).T]

    return _chosen(seen, fit)


def ridge(seen: Tokens) -> Answers:
    return _chosen(seen, lambda part: _ridges(part, lambda tokens: tokens))


def ridge_on_random_features(seen: Tokens) -> Answers:
    """Fit ridge regression to a random projection behind a ReLU, as RanPAC does."""
    projection = np.random.default_rng(0).normal(size=(seen.tokens_NW.shape[1], PROJECTED))

    def lift(tokens: Floats) -> Floats:
        return np.asarray(np.maximum(_unit(tokens) @ projection, 0.0))

    return _chosen(seen, lambda part: _ridges(part, lift))


def _ridges(seen: Tokens, lift: Callable[[Floats], Floats]) -> list[Answers]:
    """Fit one-hot targets under each penalty; every class weighs the same."""
    lifted = lift(seen.tokens_NW)
    counts = np.bincount(seen.labels_N, minlength=seen.classes)
    weights = 1.0 / (counts[seen.labels_N] * seen.classes)
    mean = weights @ lifted
    root = np.sqrt(weights)[:, None]
    rows = root * (lifted - mean)
    targets = root * (np.eye(seen.classes)[seen.labels_N] - 1 / seen.classes)
    left, lengths, axes = _svd(rows)
    scale = float((lengths**2).sum() / rows.shape[1])
    along = left.T @ targets

    def answers(penalty: float) -> Answers:
        inner = along * (lengths / (lengths**2 + penalty * scale))[:, None]
        return lambda tokens: 10 * ((lift(tokens) - mean) @ axes.T) @ inner

    return [answers(penalty) for penalty in RIDGES]


def _svd(rows: Floats) -> tuple[Floats, Floats, Floats]:
    """Decompose by the smaller of the two Gram matrices, which is much faster."""
    if len(rows) <= rows.shape[1]:
        values, left = np.linalg.eigh(rows @ rows.T)
        keep = values > 1e-10 * values[-1]
        lengths, left = np.sqrt(values[keep]), left[:, keep]
        return left, lengths, (left.T @ rows) / lengths[:, None]
    values, axes = np.linalg.eigh(rows.T @ rows)
    keep = values > 1e-10 * values[-1]
    lengths, axes = np.sqrt(values[keep]), axes[:, keep].T
    return (rows @ axes.T) / lengths, lengths, axes


def _chosen(seen: Tokens, fit: Callable[[Tokens], list[Answers]]) -> Answers:
    """Choose the candidate and its temperature by cross-validation, and fit it to all images."""
    folds = np.zeros(len(seen.labels_N), dtype=np.int64)
    folds[np.argsort(seen.labels_N, kind="stable")] = np.arange(len(folds)) % FOLDS
    logits: list[Floats] = []
    for fold in range(FOLDS):
        out = folds == fold
        for place, answers in enumerate(fit(seen.take(~out))):
            if place == len(logits):
                logits.append(np.zeros((len(folds), seen.classes)))
            logits[place][out] = answers(seen.tokens_NW[out])
    found = []
    for place, left_out in enumerate(logits):
        judged = seen.judged(left_out)
        temperature = fit_temperature(judged)
        loss = negative_log_likelihood(judged, float(np.log(temperature)))
        found.append((loss, place, temperature))
    _, place, temperature = min(found)
    best = fit(seen)[place]
    return lambda tokens: best(tokens) / temperature


def _linear(linear: Linear) -> Answers:
    weight, bias = linear
    return lambda tokens: tokens @ weight.T + bias


def _unit(rows: Floats) -> Floats:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))


HEADS: dict[str, Callable[[Tokens], Answers]] = {
    "logistic": logistic,
    "LDA": discriminant,
    "ridge": ridge,
    "RanPAC": ridge_on_random_features,
    "nearest mean": nearest_mean,
}


def score(fit: Callable[[], Answers], test: Tokens) -> Score:
    started = time.perf_counter()
    answers = fit()
    seconds = time.perf_counter() - started
    judged = test.judged(answers(test.tokens_NW))
    accuracy, error = judged.accuracy(), judged.calibration_error(temperature=1.0)
    assert accuracy is not None
    assert error is not None
    return Score(accuracy=accuracy, calibration_error=error, seconds=seconds)


def mean_of(scores: Sequence[Score]) -> Score:
    return Score(
        accuracy=float(np.mean([one.accuracy for one in scores])),
        calibration_error=float(np.mean([one.calibration_error for one in scores])),
        seconds=float(np.mean([one.seconds for one in scores])),
    )


def _at_hand(seen: Tokens, *, exemplars: int) -> Tokens:
    """Keep all images of the last task, and the exemplars of older ones."""
    older = seen.classes - A_TASK
    return seen.only(range(seen.classes), [exemplars] * older + [A_CLASS] * A_TASK)


def draws(data: Tokens, *, classes: int, count: int) -> Iterator[list[int]]:
    for seed in range(count):
        yield np.random.default_rng(seed).permutation(data.classes)[:classes].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    train: Tokens
    test: Tokens
    times: int

    def compare(self, title: str, *, classes: int, counts: Sequence[int] | int) -> None:
        each = [counts] * classes if isinstance(counts, int) else list(counts)
        rows = {}
        for name, fit in HEADS.items():
            if name == "RanPAC" and sum(each) > 2 * PROJECTED:
                continue  # it takes minutes
            rows[name] = mean_of(
                [
                    score(partial(fit, self.train.only(chosen, each)), self.test.only(chosen))
                    for chosen in draws(self.train, classes=classes, count=self.times)
                ]
            )
        print_row(title, rows)

    def tasks(self) -> dict[str, Score]:
        """Five tasks of five classes, with the images of old classes that are left."""
        found: dict[str, list[Score]] = {}
        for chosen in draws(self.train, classes=TASKS * A_TASK, count=self.times):
            seen = self.train.only(chosen, [A_CLASS] * len(chosen))
            fits: dict[str, Callable[[], Answers]] = {AT_ONCE: partial(logistic, seen)}
            for left in (2, 8, 20):
                hand = _at_hand(seen, exemplars=left)
                fits[f"{left} exemplars"] = partial(logistic, hand)
            for left in (0, 2, 20):
                hand = _at_hand(seen, exemplars=left)
                fits[f"statistics and {left} exemplars"] = partial(
                    from_statistics, hand, images=seen
                )
            for name, fit in fits.items():
                found.setdefault(name, []).append(score(fit, self.test.only(chosen)))
        return {name: mean_of(scores) for name, scores in found.items()}


def print_row(title: str, rows: dict[str, Score]) -> None:
    cells = [
        f"{name} {100 * one.accuracy:.1f} / {one.calibration_error:.3f} / {one.seconds:.1f} s"
        for name, one in rows.items()
    ]
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def read_npz(path: Path) -> tuple[Tokens, Tokens]:
    with np.load(path, allow_pickle=False) as arrays:
        parts = [
            Tokens(
                tokens_NW=arrays[f"{part}_x"].astype(np.float64),
                labels_N=arrays[f"{part}_y"].astype(np.int64),
                classes=int(arrays["train_y"].max()) + 1,
            )
            for part in ("train", "test")
        ]
    return parts[0], parts[1]


def through_the_product(store: str, data: Path, test: Path) -> tuple[Tokens, Tokens]:
    """Make tokens with the first expert of the version that channel `production` names."""
    opened = Store.open(store)
    head = opened.head("production")
    if head is None:
        raise SystemExit(f"{store}: the channel names no version")
    manifest = opened.resolve(head)
    network = load_network(opened.read_shard, manifest)
    experts, width = Lineage.of(network), network.spec.slice_width(0)
    names = list_classes(data).names
    found = []
    for folder in (data, test):
        images = read_images(
            list_classes(folder),
            preprocessing=manifest.preprocessing,
            skip_bad=False,
            progress=show_progress(),
        ).among(names)
        tokens = in_batches(
            network, images.pixels_NHWC, experts.token, preprocessing=manifest.preprocessing
        )
        found.append(
            Tokens(
                tokens_NW=tokens[:, :width].astype(np.float64),
                labels_N=images.labels_N,
                classes=len(names),
            )
        )
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", nargs="?", type=Path, help="an npz file")
    parser.add_argument("--store", help="make the tokens with this store's first expert")
    parser.add_argument("--data", type=Path, help="one folder a class, to learn from")
    parser.add_argument("--test", type=Path, help="one folder a class, to judge by")
    parser.add_argument("--times", type=int, default=3, help="draws of classes (default: 3)")
    parser.add_argument("--only-tasks", action="store_true", help="the last table alone")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.tokens is not None:
        train, test = read_npz(asked.tokens)
    elif asked.store and asked.data and asked.test:
        train, test = through_the_product(asked.store, asked.data, asked.test)
    else:
        parser.error("give an npz file, or --store, --data and --test")
    bench = Bench(train=train, test=test, times=asked.times)
    if not asked.only_tasks:
        _tables(bench)
    scores = bench.tasks()
    for name, one in scores.items():
        print_row(name, {"": one})
    print_figures(_figures(scores), measured=_measured(scores), as_json=asked.json)


def _tables(bench: Bench) -> None:
    most = int(np.bincount(bench.train.labels_N).min())
    for classes in (5, 25, 60, 100):
        if classes > bench.train.classes:
            continue
        for count in (5, 10, 20, 40, 100, 200):
            if count <= most:
                bench.compare(f"{classes} × {count}", classes=classes, counts=count)
    uneven = [max(5, round(most * 0.85**place)) for place in range(25)]
    bench.compare(f"25, uneven: {uneven[0]} to {uneven[-1]}", classes=25, counts=uneven)


def _measured(scores: dict[str, Score]) -> dict[str, float]:
    return {f"{name}: accuracy, %": 100 * one.accuracy for name, one in scores.items()}


def _figures(scores: dict[str, Score]) -> list[Figure]:
    at_once, bare = scores[AT_ONCE], scores["statistics and 0 exemplars"]
    return [
        at_least(
            "statistics and 0 exemplars against all images at once, points",
            100 * (bare.accuracy - at_once.accuracy),
            -1.0,
        ),
        at_most("calibration error with statistics and 0 exemplars", bare.calibration_error, 0.03),
    ]


if __name__ == "__main__":
    main()
