"""Define the JSON of a report, as the OpenAPI document shows it."""

from __future__ import annotations

from pydantic import BaseModel

from model_store.records.describe import Verdict
from model_store.records.manifest import Scalar
from model_store.records.quality import CalibrationError, ClassChange, Flip, TrainingRun, Unknown


class Measured(BaseModel):
    """A share that was measured on `images`, with the ends of its 95 % interval (Wilson). `images`,
    `low` and `high` are null where the number of images is not recorded."""

    share: float
    images: int | None = None
    low: float | None = None
    high: float | None = None


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
    recorded; the whole list is null where it would be too long."""

    name: str
    classes: int
    learnt: Measured | None
    now: Measured | None
    accuracy: list[float | None] | None


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
    """One version of the lineage, with the accuracy that was measured when it was made."""

    version: int
    change: str
    created: str
    tasks: int
    classes: int
    parameters: int
    gflop: float
    delta_bytes: int
    total_bytes: int
    accuracy: Measured | None


class ReportPicture(BaseModel):
    """A held-out image, at `report/images/{number}`. `before` is the parent's answer."""

    number: int
    label: str
    answer: str
    before: str | None
    confidence: float


class ReportAnswer(BaseModel):
    """The report of a version, from its manifest and those of its ancestors. `judged`: images were
    answered when the version was made; without it `notes` say why there are no figures.
    `matrix` counts images by class (rows) and answer (columns), in the order of `classes`; it is
    null for many classes, and `confused` has the most frequent pairs. `classes` lists at most 500
    of `all_classes`: then the worst ones. `pictures_note` says why
    there are no pictures, or not all."""

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
    calibration: ReportCalibration
    unknown: Unknown | None
    latency: ReportLatency | None
    run: TrainingRun | None
    training: dict[str, Scalar]
    growth: list[Grown]
    pictures: list[ReportPicture]
    pictures_note: str
