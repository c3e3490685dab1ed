"""How well images of classes never taught are told, by score, on tokens of a backbone.

`--few`: with five classes of 10 to 12 images, how many known images are called unknown, beside the
score and the threshold of held-out images alone that classes of many images have.

Some classes are known, the rest is unknown. Every score is fitted to a few training images of the
known classes, without any other images, and judged by test images of known and unknown classes.

The tokens are a file of numpy (`.npz`) with `train_x` [N, W], `train_y` [N], `test_x` [M, W],
`test_y` [M] and `classes`: pooled tokens of a frozen backbone and the classes' numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.inference.doubt import Doubt
from trainer.evaluation import unknown
from trainer.evaluation.unknown import (
    Doubles,
    DoubtFit,
    Labels,
    auroc,
    discriminant_weight,
    fit_doubt,
    fit_gaussians,
    fit_threshold,
    leave_out,
)
from trainer.fitting.logistic import solve
from trainer.fitting.problem import Problem
from trainer.learning.losses import cross_entropy

KNOWN_CLASSES = 25
FEW_CLASSES = 5
KEPT = 0.95
RATE = 0.05
HELD_OUT = 4
"""Images of each class that the threshold is set by, as the trainer does with 40."""
L2_PENALTY, TEMPERATURE = 0.1, 0.4
"""The choice of the trainer's cross-validation with 36 images a class of ViT-Ti's tokens."""
NEIGHBOURS = 5
RESIDUAL_SHARE = 0.4
"""ViM: the share of directions in which training tokens vary least."""
CLIPPED_AT = 95
"""ReAct: the percentile of training activations that larger ones are cut to."""
SHRUNK = 0.3
"""Relative Mahalanobis: the share of the identity in both covariances, the best of 0.1 to 0.9."""
BINS = 10
CHOSEN = "discriminant + distance"
TODAY = "largest logit"
WEIGHTS = (1.0, 1.5, 2.0, 3.0, 5.0, 1e6)
"""Of the discriminant beside the squared length: 1 is the distance, the last the discriminant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Training images of known classes, held-out ones, and test images of both kinds of classes."""

    train_NW: Doubles
    labels_N: Labels
    held_out_HW: Doubles
    known_KW: Doubles
    unknown_UW: Doubles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--tokens", required=True, type=Path, help="tokens, as described above")
    parser.add_argument("--draws", type=int, default=4, help="choices of known classes")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--images", default="40,20,10,5", help="training images a class")
    parser.add_argument("--auroc", type=float, default=0.88, help="asked of the score")
    parser.add_argument("--few", action="store_true", help="five classes of 10 to 12 images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = dict(np.load(options.tokens, allow_pickle=False))
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    seeds = range(options.seed, options.seed + options.draws)
    if options.few:
        figures, measured = measure_few(tokens, seeds=seeds)
        options.images = ""
    for images in map(int, filter(None, options.images.split(","))):
        table = measure(tokens, images=images, seeds=seeds)
        print(f"{images} images a class, {options.draws} draws", file=sys.stderr)
        for name, row in sorted(table.items(), key=lambda pair: -pair[1]["auroc"]):
            told = "  ".join(f"{what} {value:.3f}" for what, value in row.items())
            print(f"  {name:28} {told}", file=sys.stderr)
            measured |= {f"{images}: {name}: {what}": value for what, value in row.items()}
        if not figures:
            chosen, today = table[CHOSEN], table[TODAY]
            figures = [
                at_least("AUROC of classes never taught", chosen["auroc"], options.auroc),
                at_least("better than the largest logit", chosen["auroc"] - today["auroc"], 0.0),
                at_most("unknown answered as known, 95 % of known kept", chosen["taken"], 0.35),
                at_most("calibration error of the probability", chosen["ece"], 0.05),
            ]
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def measure_few(
    tokens: dict[str, NDArray[np.float32]], *, seeds: range
) -> tuple[list[Figure], dict[str, float]]:
    """Draw five classes of 10 to 12 images each, two of them held out, and ask about new images."""
    found: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        drawn = draw(tokens, seed=seed, images=(10, 12), known_classes=FEW_CLASSES, held_out=2)
        held_out_N = np.repeat(np.arange(FEW_CLASSES), 2)
        everything = np.concatenate([drawn.train_NW, drawn.held_out_HW])
        labels_N = np.concatenate([drawn.labels_N, held_out_N])
        now = _few_score(everything, labels_N)
        rule = fit_threshold(now.left_out_F, score="log-odds", rate=RATE)
        with mock.patch.object(unknown, "_UNSHIFTED_CLASSES", 0):  # as with many classes
            before = _few_score(drawn.train_NW, drawn.labels_N)
        score = _log_odds(before)
        held_out_rule = fit_threshold(score(drawn.held_out_HW), score="log-odds", rate=RATE)
        assert rule is not None
        assert held_out_rule is not None
        for name, threshold, of in (
            ("", rule.threshold, _log_odds(now)),
            (", held-out images alone", held_out_rule.threshold, score),
        ):
            known, strange = of(drawn.known_KW), of(drawn.unknown_UW)
            found[f"known refused{name}"].append(float((known < threshold).mean()))
            found[f"unknown accepted{name}"].append(float((strange >= threshold).mean()))
            found[f"AUROC{name}"].append(auroc(known, strange))
    measured = {name: float(np.mean(values)) for name, values in found.items()}
    measured |= {f"{name}, deviation": float(np.std(values)) for name, values in found.items()}
    accepted = "unknown accepted"
    more = measured[accepted] - measured[f"{accepted}, held-out images alone"]
    return [
        at_most("known images called unknown, 10 to 12 a class", measured["known refused"], 0.08),
        at_most("unknown accepted, beside held-out images alone", more, 0.0),
    ], measured


def _few_score(tokens_NW: Doubles, labels_N: Labels) -> DoubtFit:
    fit = fit_doubt(
        tokens_NW.astype(np.float32),
        labels_N,
        classes=FEW_CLASSES,
        answered=range(FEW_CLASSES),
        groups_N=np.arange(len(labels_N)),
    )
    assert fit is not None
    return fit


def _log_odds(fit: DoubtFit) -> Score:
    doubt = Doubt.of(fit.tensors, places=range(FEW_CLASSES))
    return lambda q: doubt.log_odds(q.astype(np.float32)).astype(np.float64)


def measure(
    tokens: dict[str, NDArray[np.float32]], *, images: int, seeds: range
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        held_out = HELD_OUT if images > 2 * HELD_OUT else 0
        drawn = draw(
            tokens,
            seed=seed,
            images=(images, images),
            known_classes=KNOWN_CLASSES,
            held_out=held_out,
        )
        for name, score in scores_of(drawn).items():
            known, strange = score(drawn.known_KW), score(drawn.unknown_UW)
            found[name]["auroc"].append(auroc(known, strange))
            limit = np.quantile(known, 1 - KEPT)
            found[name]["taken"].append(float((strange >= limit).mean()))
            if name == CHOSEN:
                found[name]["ece"].append(calibration_error(known, strange))
            if len(drawn.held_out_HW) and name in (CHOSEN, TODAY):
                rule = fit_threshold(score(drawn.held_out_HW), score="log-odds", rate=RATE)
                assert rule is not None
                found[name]["refused"].append(float((known < rule.threshold).mean()))
                found[name]["accepted"].append(float((strange >= rule.threshold).mean()))
    return {
        name: {what: float(np.mean(values)) for what, values in row.items()}
        for name, row in found.items()
    }


def draw(
    tokens: dict[str, NDArray[np.float32]],
    *,
    seed: int,
    images: tuple[int, int],
    known_classes: int,
    held_out: int,
) -> Draw:
    """Draw classes, and from `images[0]` to `images[1]` images of each."""
    choose = np.random.default_rng(seed)
    order = choose.permutation(len(tokens["classes"]))
    known, strange = order[:known_classes], order[known_classes:]
    train, held, labels = [], [], []
    for place, name in enumerate(known):
        rows = choose.permutation(np.flatnonzero(tokens["train_y"] == name))
        rows = rows[: images[0] + choose.integers(images[1] - images[0] + 1)]
        held.append(rows[:held_out])
        train.append(rows[held_out:])
        labels += [place] * len(train[-1])
    train_x, test_x = (tokens[name].astype(np.float64) for name in ("train_x", "test_x"))
    return Draw(
        train_NW=train_x[np.concatenate(train)],
        labels_N=np.array(labels, dtype=np.int64),
        held_out_HW=train_x[np.concatenate(held)],
        known_KW=test_x[np.isin(tokens["test_y"], known)],
        unknown_UW=test_x[np.isin(tokens["test_y"], strange)],
    )


Score = Callable[[Doubles], Doubles]


def scores_of(drawn: Draw) -> dict[str, Score]:
    """Fit every score to the training images; higher is known."""
    x, y = drawn.train_NW, drawn.labels_N
    weight_YW, bias_Y = _classifier(x, y)
    gaussians = fit_gaussians(x, y)
    assert gaussians is not None
    left_out = leave_out(x, y)
    assert left_out is not None
    by_weight = {
        weight: auroc(
            *(left_out.score(weight)[chosen] for chosen in (left_out.known_F, ~left_out.known_F))
        )
        for weight in (*WEIGHTS, discriminant_weight(left_out))
    }
    best = max(by_weight, key=by_weight.__getitem__)

    def logits(q: Doubles) -> Doubles:
        return q @ weight_YW.T + bias_Y

    def weighed(weight: float) -> Score:
        def score(q: Doubles) -> Doubles:
            linear, square = gaussians.signs(q)
            return weight * linear - square / 2

        return score

    clip = np.percentile(x, CLIPPED_AT)
    return {
        TODAY: lambda q: logits(q).max(axis=1),
        "energy": lambda q: _log_sum_exp(logits(q)),
        "largest probability": lambda q: logits(q).max(axis=1) - _log_sum_exp(logits(q)),
        "ReAct": lambda q: _log_sum_exp(logits(np.minimum(q, clip))),
        "ViM": _vim(x, weight_YW, bias_Y),
        "cosine to a class mean": _cosine(x, y),
        "nearest neighbours": _neighbours(x),
        "Mahalanobis": weighed(1.0),
        "relative Mahalanobis": _relative(x, y),
        "discriminant": weighed(WEIGHTS[-1]),
        "weight by cross-validation": weighed(best),
        CHOSEN: _product(x, y),
    }


def _product(x: Doubles, y: Labels) -> Score:
    """The score as the trainer fits it and the server computes it."""
    fit = fit_doubt(x.astype(np.float32), y, classes=KNOWN_CLASSES, answered=range(KNOWN_CLASSES))
    assert fit is not None
    doubt = Doubt.of(fit.tensors, places=range(KNOWN_CLASSES))
    return lambda q: doubt.log_odds(q.astype(np.float32)).astype(np.float64)


def _classifier(x: Doubles, y: Labels) -> tuple[Doubles, Doubles]:
    tokens = torch.from_numpy(x)
    problem = Problem(
        tokens_NW=tokens, labels_N=torch.from_numpy(y), count=KNOWN_CLASSES, loss=cross_entropy
    )
    variance = float((tokens - tokens.mean(dim=0)).square().mean())
    weight, bias = solve(problem, l2_penalty=L2_PENALTY * variance, tolerance=1e-5)
    return weight.numpy() / TEMPERATURE, bias.numpy() / TEMPERATURE


def _vim(x: Doubles, weight_YW: Doubles, bias_Y: Doubles) -> Score:
    centre = -np.linalg.pinv(weight_YW) @ bias_Y
    _, axes = np.linalg.eigh((x - centre).T @ (x - centre))
    least = axes[:, : int(RESIDUAL_SHARE * len(axes))]

    def logits(q: Doubles) -> Doubles:
        return np.asarray(q @ weight_YW.T + bias_Y)

    def residual(q: Doubles) -> Doubles:
        return np.asarray(np.linalg.norm((q - centre) @ least, axis=1))

    scale = logits(x).max(axis=1).mean() / residual(x).mean()
    return lambda q: _log_sum_exp(logits(q)) - scale * residual(q)


def _cosine(x: Doubles, y: Labels) -> Score:
    means = _unit(np.stack([_unit(x)[y == place].mean(axis=0) for place in range(KNOWN_CLASSES)]))
    return lambda q: (_unit(q) @ means.T).max(axis=1)


def _neighbours(x: Doubles) -> Score:
    unit = _unit(x)
    return lambda q: np.sort(_unit(q) @ unit.T, axis=1)[:, -NEIGHBOURS]


def _relative(x: Doubles, y: Labels) -> Score:
    """The distance to the nearest mean, less that to one normal distribution of all images. Both
    covariances are shrunk by the same share."""
    unit = _unit(x)
    means = np.stack([unit[y == place].mean(axis=0) for place in range(KNOWN_CLASSES)])
    within, total = unit - means[y], unit - unit.mean(axis=0)

    def squares(covariance: Doubles, away: Doubles) -> Doubles:
        level = np.trace(covariance) / len(covariance)
        shrunk = (1 - SHRUNK) * covariance + SHRUNK * level * np.eye(len(covariance))
        return np.asarray(np.einsum("nw,wv,nv->n", away, np.linalg.inv(shrunk), away))

    def score(q: Doubles) -> Doubles:
        inside = within.T @ within / (len(unit) - KNOWN_CLASSES)
        near = np.stack([squares(inside, _unit(q) - mean) for mean in means]).min(axis=0)
        far = squares(total.T @ total / len(unit), _unit(q) - unit.mean(axis=0))
        return np.asarray(far - near)

    return score


def calibration_error(known: Doubles, unknown: Doubles) -> float:
    """The expected calibration error of log-odds, as if half of the images were unknown."""
    odds = np.concatenate([known, unknown])
    is_known = np.arange(len(odds)) < len(known)
    share = np.where(is_known, 0.5 / len(known), 0.5 / len(unknown))
    gaps = share * (1 / (1 + np.exp(-odds)) - is_known)
    return float(sum(abs(gaps[rows].sum()) for rows in np.array_split(np.argsort(odds), BINS)))


def _unit(x: Doubles) -> Doubles:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def _log_sum_exp(logits: Doubles) -> Doubles:
    most = logits.max(axis=1)
    return np.asarray(most + np.log(np.exp(logits - most[:, None]).sum(axis=1)))


if __name__ == "__main__":
    sys.exit(main())
