"""Tell from the figures of a quick version whether growing the network is worth its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model_store.records.manifest import Scalar
from model_store.tables import percent

CROSS_VALIDATED = "cross_validation"
"""The figure of a task's training that holds its cross-validated accuracy."""
FEWEST_IMAGES = 8
"""Images a class, on average, below which there is too little to change all blocks by."""
ENOUGH = {"narrow": 0.85, "wide": 0.95}
"""The cross-validated accuracy from which a classifier on frozen tokens is good enough. Where
earlier blocks tell more than the last one, images are unlike those that the expert was trained on,
and it has more to learn from them."""
GAIN_SHARE = 0.5
"""The share of the errors that an adaptation usually mends at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The prospect of growing a network that answers some classes badly."""

    accuracy: float
    """Of the version that is there, by cross-validation."""
    classes: int

    @property
    def points(self) -> int:
        """The gain to expect, in points of 100."""
        return round(100 * GAIN_SHARE * (1 - self.accuracy))

    def __str__(self) -> str:
        return (
            f"cross-validation: {percent(self.accuracy)}; adapting the first expert to these "
            f"{self.classes} classes usually gains {self.points} points or more"
        )


def worth_growing(training: Mapping[str, Scalar], *, images: int, classes: int) -> Worth | None:
    """Judge by the figures of the newest task; None where there is hardly anything to win."""
    accuracy = training.get(CROSS_VALIDATED)
    if not isinstance(accuracy, float | int) or isinstance(accuracy, bool):
        return None  # one class, or too few images to leave any out
    readout = "wide" if training.get("readout") == "wide" else "narrow"
    if accuracy >= ENOUGH[readout] or classes < 2 or images < FEWEST_IMAGES * classes:
        return None
    return Worth(accuracy=float(accuracy), classes=classes)
