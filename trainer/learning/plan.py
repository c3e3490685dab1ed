"""Choose how long and how fast to learn from the number of images, unless the user has said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.request import Effort

STEPS = 700
"""The steps for a small set of images; MIN_EPOCHS gives larger sets more."""
MIN_EPOCHS = 20
MAX_EPOCHS = 300
BATCH = 32
RATE = 1e-3
RATE_WIDTH = 128
"""The width for which RATE is meant; wider networks learn more slowly."""
PRETRAINED_PASSES = 1600
"""Images in all epochs together, for an expert that reads a pre-trained one; see ADR 15."""
PRETRAINED_MIN_EPOCHS = 3
PRETRAINED_BATCH = 16
PRETRAINED_TUNING_SHARE = 0.2
TUNING_SHARE = 0.35
"""The steps of balanced tuning for each step of learning; see ADR 48."""
TUNING_RATE_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The length and rate of learning."""

    epochs: int
    batch_size: int
    learning_rate: float

    def for_tuning(self, *, share: float, learnt: int, balanced: int) -> Plan:
        """Plan the balanced tuning that follows: shorter and slower.

        `share` is of the steps: an epoch of `balanced` images may be much shorter than one of
        `learnt` images.
        """
        return Plan(
            epochs=max(1, round(share * self.epochs * learnt / balanced)),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate * TUNING_RATE_SHARE,
        )


def make_plan(effort: Effort, *, images: int, width: int) -> Plan:
    batch_size = effort.batch_size or BATCH
    return Plan(
        epochs=effort.epochs or _epochs(STEPS * batch_size, images, least=MIN_EPOCHS),
        batch_size=batch_size,
        learning_rate=effort.learning_rate or _rate(width),
    )


def make_plan_on_pretrained(effort: Effort, *, images: int, width: int) -> Plan:
    """Plan learning beside a pre-trained expert, with `images` an epoch.

    Fewer images suffice: each is large, and the pre-trained expert knows most of its content.
    """
    return Plan(
        epochs=effort.epochs or _epochs(PRETRAINED_PASSES, images, least=PRETRAINED_MIN_EPOCHS),
        batch_size=effort.batch_size or PRETRAINED_BATCH,
        learning_rate=effort.learning_rate or _rate(width),
    )


def _epochs(passes: int, images: int, *, least: int) -> int:
    return min(max(round(passes / images), least), MAX_EPOCHS)


def _rate(width: int) -> float:
    return RATE * math.sqrt(RATE_WIDTH / width)
