"""Define the figures of a version in its manifest: metrics, gate, calibration, threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field

from model_store.records.sealing import LATER, Count, Record, Share, Text, Timestamp

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""A fit ends between 0.03 and 30: beyond these, a manifest was not written by a trainer."""
Reduced = Literal["bf16", "int8"]
"""Precisions below single precision."""
Side = Literal["old", "new"]
"""`old`: the classes that a version had before. `new`: those that it brings."""
ScoreName = Literal["max-logit", "log-odds"]
_MAX_BINS = 64
MAX_SHOWN = 24
"""Images that a report shows."""
SCORE_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Upper bounds of the bins in which calibrated probabilities are counted; the last bin has none."""
_ScoreCounts = Annotated[
    tuple[Count, ...], Field(min_length=len(SCORE_BOUNDS) + 1, max_length=len(SCORE_BOUNDS) + 1)
]


class CalibrationError(Record):
    """Expected calibration errors; null without images to judge by."""

    all: Share | None = None
    old: Share | None = None
    new: Share | None = None


class CalibrationBin(Record):
    """The images whose answers have a confidence from `low` to `high`: how many they are, how many
    were answered right, and their mean confidence."""

    low: Share
    high: Share
    images: Annotated[Count, Field(ge=1)]
    right: Count
    confidence: Share


class Calibration(Record):
    """Logits are divided by `temperature` before the softmax. The errors are those of images that
    the temperature they are taken with was not fitted on, and so are the bins."""

    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    before: CalibrationError = CalibrationError()
    after: CalibrationError = CalibrationError()
    images: Count = 0
    bins: Annotated[tuple[CalibrationBin, ...], Field(max_length=_MAX_BINS), LATER] = ()


class Histogram(Record):
    """Counts of numbers in equal bins from `low` to `high`."""

    low: float
    high: float
    counts: Annotated[tuple[Count, ...], Field(min_length=1, max_length=_MAX_BINS)]


class ClassThreshold(Record):
    """A threshold that a person has set for a class: an image whose likeliest class it is belongs
    to none of the classes where their probability is above `above`."""

    above: Share
    actor: Text
    reason: Text
    time: Timestamp


class Unknown(Record):
    """An image with a score below `threshold` belongs to none of the classes. The scores:
    `max-logit` is the largest logit; `log-odds` is what the doubt shard gives."""

    score: ScoreName
    threshold: float
    rate: Annotated[float, Field(gt=0, lt=1)]
    images: Count
    scores: Annotated[Histogram | None, LATER] = None
    """The scores of these images."""
    by_class: Annotated[dict[str, ClassThreshold], LATER] = Field(default_factory=dict)
    """Thresholds of single classes, which count instead of the fitted one."""

    def with_thresholds(self, by_class: Mapping[str, ClassThreshold]) -> Self:
        """Take other thresholds of single classes. A score that is no probability has none."""
        return self.model_copy(update={"by_class": by_class if self.score == "log-odds" else {}})


class Accuracy(Record):
    """Shares of right answers; null without images to judge by."""

    all: float | None = None
    old: float | None = None
    new: float | None = None
    parent_old: float | None = None


class ClassChange(Record):
    """A class that the parent answered better."""

    class_name: str = Field(alias="class")
    before: Share
    after: Share
    images: Count


class Confusion(Record):
    """The number of images of a class that were taken for another."""

    class_name: str = Field(alias="class")
    taken_for: str
    count: Count


class Flip(Record):
    """The number of images of an old class with the answer `after`, and `before` by the parent."""

    class_name: str = Field(alias="class")
    before: str
    after: str
    count: Count


class Gate(Record):
    """The verdict on a version before it is promoted, and the figures that it stands on."""

    passed: bool
    forced: bool = False
    reasons: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    not_judged: tuple[Side, ...] = ()
    """The sides with too few images to refuse a version by, whatever it answered."""
    old_images: Count = 0
    new_images: Count = 0
    got_worse: Count = 0
    got_better: Count = 0
    p_value: Share | None = None
    latency_ms: Annotated[float, Field(ge=0)] | None = None
    worse: tuple[ClassChange, ...] = ()
    confused: tuple[Confusion, ...] = ()
    flipped: tuple[Flip, ...] = ()


class JudgedImage(Record):
    """An image that was answered wrongly, or otherwise than by the parent: the held-out image of
    its class with the number `image`, counted from 0. `before` is the parent's answer, or null for
    a new class. The pixels are in the held-out shard alone, and go with it."""

    class_name: str = Field(alias="class")
    image: Count
    answer: str
    before: str | None = None
    confidence: Share


class TrainingRun(Record):
    """The run that made a version. `command` has no folders but their names, and no addresses."""

    command: Text = ""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    seconds: Annotated[float, Field(ge=0)]
    machine: Text = ""
    latency_ms: Annotated[float, Field(ge=0)] | None = None
    """Time of one core for one image; null for a version that costs as much as its parent."""


class Metrics(Record):
    """The figures that were measured on images that the version was not trained on."""

    accuracy: Accuracy = Accuracy()
    per_class: dict[str, float] = Field(default_factory=dict)
    images: Count = 0
    source: Literal["held-out", "validation", "none"] = "none"
    confusion: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Counts of images of a class (outer) that were taken for a class (inner), without zeros.
    Kept because the images may be forgotten."""
    gate: Gate | None = None
    agreement: dict[Reduced, Share] = Field(default_factory=dict)
    """Shares of images that get the same answer in this precision as in single precision."""
    shown: Annotated[tuple[JudgedImage, ...], Field(max_length=MAX_SHOWN), LATER] = ()
    """Some images for the report."""
    run: Annotated[TrainingRun | None, LATER] = None
    """None where nothing was learnt."""
    scores: Annotated[_ScoreCounts | None, LATER] = None
    """Images by the calibrated probability of their answer, in the bins of SCORE_BOUNDS."""
