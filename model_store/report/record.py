"""Define the record of facts on a version: `report.json` of a server, and the data of its page."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import BaseModel

from model_store.records.describe import Verdict
from model_store.records.manifest import Scalar
from model_store.records.quality import CalibrationError, ClassChange, Flip, TrainingRun, Unknown
from model_store.tables import likely_range

Counts = tuple[int, int]
"""Right answers, and images."""
Table = Mapping[str, Mapping[str, int]]
"""Images of a class (outer) that were taken for a class (inner), without zeros."""


class Measured(BaseModel):
    """A share that was measured on `images`, with the ends of its 95 % interval (Wilson). `images`,
    `low` and `high` are null where the number of images is not recorded."""

    share: float
    images: int | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, share: float | None, images: int | None) -> Measured | None:
        """Put a share beside its interval. Return None where nothing was measured."""
        if share is None:
            return None
        return cls.on(images, share) if images else cls(share=share)

    @classmethod
    def on(cls, images: int, share: float) -> Measured:
        share = min(max(share, 0.0), 1.0)  # a record may hold anything
        low, high = likely_range(share, images)
        return cls(share=share, images=images, low=round(low, 4), high=round(high, 4))

    @classmethod
    def of_counts(cls, counts: Counts | None) -> Measured | None:
        right, images = counts or (0, 0)
        return cls.on(images, right / images) if images else None


def count_right(table: Table, names: Collection[str]) -> Counts | None:
    """Count the right answers and the images of some classes. Return None without images."""
    rows = [(name, table[name]) for name in names if name in table]
    images = sum(sum(answers.values()) for _, answers in rows)
    return (sum(answers.get(name, 0) for name, answers in rows), images) if images else None


class ReportAccuracy(BaseModel):
    """`parent_old`: the parent's accuracy on the old classes."""

    all: Measured | None
    old: Measured | None
    new: Measured | None
    parent_old: Measured | None


class ReportClass(BaseModel):
    """`right`: the share of the class's images that were answered with the class. `precision`: the
    share of these answers that were right."""

    label: str
    task: str
    right: Measured | None
    precision: Measured | None


class ReportConfused(BaseModel):
    label: str
    taken_for: str
    images: int


class ReportTask(BaseModel):
    """`accuracy`: in each version of `growth`, null before the task was learnt or where it is not
    recorded; the whole list is null where it would be too long. `forgotten`: the best of these
    minus the newest."""

    name: str
    classes: int
    learnt: Measured | None
    now: Measured | None
    accuracy: list[float | None] | None
    forgotten: float | None


class ReportBin(BaseModel):
    """Images whose answers have a confidence from `low` to `high`. `confidence` is their mean."""

    low: float
    high: float
    confidence: float
    right: Measured


class ReportCalibration(BaseModel):
    """`before` and `after` are expected calibration errors without and with the temperature."""

    temperature: float
    before: CalibrationError
    after: CalibrationError
    images: int
    bins: list[ReportBin]


class ReportLatency(BaseModel):
    """Time of one core of the trainer's machine for one image, measured when `version` was made,
    which costs as much."""

    milliseconds: float
    version: int


class Grown(BaseModel):
    """One version of the ancestry, with the accuracy that was measured when it was made."""

    version: int
    change: str
    created: str
    tasks: int
    classes: int
    parameters: int
    gflop: float
    delta_bytes: int
    total_bytes: int
    memory_bytes: int
    accuracy: Measured | None


class ReportPicture(BaseModel):
    """A held-out image, at `report/images/{number}`. `before` is the parent's answer."""

    number: int
    label: str
    answer: str
    before: str | None
    confidence: float


class VersionReport(BaseModel):
    """The report of a version. `judged`: images were answered when the version was made; without it
    `notes` say why there are no figures. `matrix` counts images by class (rows) and answer
    (columns), in the order of `classes`; it is null for many classes, and `confused` has the most
    frequent pairs. `classes` lists at most 500 of `all_classes`: then the worst ones. `forgetting`
    averages `forgotten` over all tasks but the newest. `proposal` says what adapting the
    version would win and cost; null where little is to win, and where it was done or tried.
    `pictures_note` says why there are no pictures, or not all."""

    version: int
    parent: int | None
    created: str
    software: str
    change: str
    judged: bool
    source: str
    images: int
    gate: Verdict
    verdict: str
    reasons: list[str]
    notes: list[str]
    proposal: str | None
    accuracy: ReportAccuracy
    classes: list[ReportClass]
    all_classes: int
    retired: list[str]
    matrix: list[list[int]] | None
    confused: list[ReportConfused]
    worse: list[ClassChange]
    flipped: list[Flip]
    got_worse: int
    got_better: int
    tasks: list[ReportTask]
    forgetting: float | None
    calibration: ReportCalibration
    unknown: Unknown | None
    refused_known: Measured | None
    """The share of known images that the threshold is to call unknown."""
    latency: ReportLatency | None
    run: TrainingRun | None
    training: dict[str, Scalar]
    growth: list[Grown]
    pictures: list[ReportPicture]
    pictures_note: str
