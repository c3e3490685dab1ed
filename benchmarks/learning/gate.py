"""How often the gate notices that old classes got worse, and how often it cries wolf.

Simulated, because the truth must be known: an image has logits of ten old classes, of which the
right one is ahead by a random margin (about 88 % right). Parent and version see them with noise of
their own, so that 3 % of the images flip to the bad and 3 % to the good though nothing fell. A
true fall is one of two: `swallowed`, a new class takes images away; `shifted`, all old classes
lose ground. `python -m benchmarks.learning.gate` prints the shares of versions that are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.gate import GateInput, count_flips, decide, sign_test
from trainer.evaluation.judged import Judged
from trainer.request import GateLimits

OLD = tuple(f"old {place}" for place in range(10))
NEW = tuple(f"new {place}" for place in range(3))
MARGIN, MARGIN_DEVIATION = 4.6, 2.2
NOISE = 0.507
"""Standard deviation of a version's own noise in a logit: it flips 3 % of the images each way."""
SHIFT = 0.564
"""The logits that right classes lose where five points of accuracy shall be lost."""
RUNS = 1000
HELD_OUT = (50, 100, 200, 400)

Logits = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Images of old classes, as the parent and the version answer them."""

    labels_N: NDArray[np.int64]
    before_NC: Logits
    after_NC: Logits

    def candidate(self) -> GateInput:
        return GateInput(
            judged=self._judged(self.after_NC, (*OLD, *NEW)),
            parent=self._judged(self.before_NC, OLD),
            older=OLD,
            newest=NEW,
            model_bytes=1,
        )

    def _judged(self, logits_NC: Logits, classes: tuple[str, ...]) -> Judged:
        return Judged(
            classes=classes, labels_N=self.labels_N, logits_NC=logits_NC.astype(np.float32)
        )


def imagine(draw: np.random.Generator, *, images: int, kind: str, fall: float) -> World:
    labels = draw.integers(len(OLD), size=images)
    rows = np.arange(images)
    truth = draw.normal(size=(images, len(OLD)))
    truth[rows, labels] += draw.normal(MARGIN, MARGIN_DEVIATION, size=images)
    before, after = (truth + NOISE * draw.normal(size=truth.shape) for _ in range(2))
    new = draw.normal(-6, 1, size=(images, len(NEW)))
    if kind == "swallowed":
        right = after.argmax(axis=1) == labels
        taken = right & (draw.random(images) < fall / right.mean())
        over = np.abs(draw.normal(0, 2, size=images))
        new[taken, 0] = after.max(axis=1)[taken] + over[taken]
    if kind == "shifted":
        after[rows, labels] -= SHIFT * fall / 0.05
    return World(labels_N=labels, before_NC=before, after_NC=np.concatenate([after, new], axis=1))


def refused_by_flips(candidate: GateInput) -> bool:
    """The rule before: a fall of more than two points, and a sign test on the flips."""
    parent, judged = candidate.parent, candidate.judged
    assert parent is not None
    worse, better = count_flips(parent, judged)
    fell = (worse - better) / len(judged.labels_N)
    return fell > 0.02 and worse > 5 and sign_test(worse=worse, better=better) <= 0.05


def refused(candidate: GateInput) -> bool:
    return not decide(candidate, limits=GateLimits()).passed


def share(
    rule: Callable[[GateInput], bool], *, images: int, kind: str, fall: float, runs: int
) -> float:
    draw = np.random.default_rng(0)
    worlds = (imagine(draw, images=images, kind=kind, fall=fall) for _ in range(runs))
    return float(np.mean([rule(world.candidate()) for world in worlds]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    print("| held-out images of old classes | true fall | refused by flips | refused by the gate |")
    print("|---|---|---|---|")
    for images in HELD_OUT:
        for kind, fall in (("none", 0.0), ("swallowed", 0.05), ("shifted", 0.05)):
            shares = [
                share(rule, images=images, kind=kind, fall=fall, runs=runs)
                for rule in (refused_by_flips, refused)
            ]
            told = f"5 points, {kind}" if fall else "none"
            print(f"| {images} | {told} | {shares[0]:.1%} | {shares[1]:.1%} |", flush=True)


if __name__ == "__main__":
    main()
