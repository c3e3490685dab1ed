"""How long and how fast to learn, chosen from the data's size where the user did not say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from model_store.errors import WrongUsage
from trainer.learning.fit import Plan

STEPS = 700
"""What a small set of images gets; more images get more, by MIN_EPOCHS."""
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
TUNING_STEPS_SHARE = 0.2
TUNING_RATE_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the command line asks. None: chosen from the number of images and the width."""

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise WrongUsage(f"--{name.replace('_', '-')} must be more than 0, not {value}")

    def plan(self, *, images: int, width: int) -> Plan:
        batch_size = self.batch_size or BATCH
        fitting = round(STEPS * batch_size / images)
        return Plan(
            epochs=self.epochs or min(max(fitting, MIN_EPOCHS), MAX_EPOCHS),
            batch_size=batch_size,
            learning_rate=self.learning_rate or RATE * math.sqrt(RATE_WIDTH / width),
        )

    def plan_on_pretrained(self, *, epoch: int, width: int) -> Plan:
        """Where a pre-trained expert is read: `epoch` images an epoch, and fewer of them, since
        every image is large and most of what can be known of it is known already."""
        fitting = round(PRETRAINED_PASSES / epoch)
        return Plan(
            epochs=self.epochs or min(max(fitting, PRETRAINED_MIN_EPOCHS), MAX_EPOCHS),
            batch_size=self.batch_size or PRETRAINED_BATCH,
            learning_rate=self.learning_rate or RATE * math.sqrt(RATE_WIDTH / width),
        )

    def tuning(self, plan: Plan) -> Plan:
        """Balanced tuning: shorter and slower."""
        return Plan(
            epochs=max(1, round(plan.epochs * TUNING_STEPS_SHARE)),
            batch_size=plan.batch_size,
            learning_rate=plan.learning_rate * TUNING_RATE_SHARE,
        )
