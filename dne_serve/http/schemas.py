"""The JSON that goes in and out, as the OpenAPI document shows it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from model_store.records.channel import ChannelRecord, Mode
from model_store.records.describe import Verdict
from model_store.records.manifest import MAX_VERSION, Preprocessing, ShardRef
from model_store.records.quality import Accuracy, Calibration, Metrics, Unknown

VersionNumber = Annotated[int, Field(ge=1, le=MAX_VERSION)]


class JsonImage(BaseModel):
    """`data` is base64, as it is or as a data URL."""

    model_config = ConfigDict(extra="forbid")

    data: str
    filename: Annotated[str, Field(max_length=4096)] | None = None


class JsonImages(BaseModel):
    """Images in JSON: base64, or base64 with a name."""

    model_config = ConfigDict(extra="forbid")

    images: Annotated[list[str | JsonImage], Field(min_length=1)]


class Score(BaseModel):
    label: str
    score: float


class Prediction(BaseModel):
    """`score` is the calibrated probability over the version's classes. `unknown`: the image is
    probably of none of them, and `label` only the nearest."""

    filename: str | None
    label: str
    score: float
    task: str
    unknown: bool
    top: list[Score]


class PredictAnswer(BaseModel):
    """All images of a request are answered by one version, in the order sent. `canary`: by the
    version that stands beside the served one for a share of the requests."""

    version: int
    canary: bool
    predictions: list[Prediction]


class VersionSummary(BaseModel):
    """`error` says why a version cannot be read; then the rest is empty. `change` says what the
    version did, `verdict` what the gate said of it: `gate` is its first word, `reasons` are the
    sentences against the version."""

    version: int
    parent: int | None = None
    created: str | None = None
    tasks: int = 0
    classes: int = 0
    new_classes: list[str] = []
    accuracy: Accuracy = Accuracy()
    delta_bytes: int = 0
    total_bytes: int = 0
    change: str = ""
    gate: Verdict | None = None
    verdict: str = ""
    reasons: list[str] = []
    error: str | None = None


class VersionsAnswer(BaseModel):
    """`versions` ascend. `next_before` is the `before` of the page with older versions; null where
    there are none. `history` has the newest records, `problems` what is wrong with those that
    cannot be read."""

    served: int | None
    channel: str
    mode: Mode | None
    versions: list[VersionSummary]
    total: int
    next_before: int | None
    history: list[ChannelRecord]
    problems: list[str]


class TaskAnswer(BaseModel):
    name: str
    classes: list[str]
    heads: int


class VersionAnswer(BaseModel):
    version: int
    parent: int | None
    created: str
    digest: str
    transaction: str
    software: str
    signed_by: str | None
    """The public key of the signature; whether it is trusted, `--require-signatures` decides."""
    tasks: list[TaskAnswer]
    classes: list[str]
    retired: list[str]
    """Classes that this version never answers any more."""
    extended: list[str]
    """Classes that got more images in this version, which then has no new task."""
    shards: list[ShardRef]
    metrics: Metrics
    verdict: str
    """What the gate said of the version, in one line."""
    calibration: Calibration
    unknown: Unknown | None
    """How images that are like none of the classes are found; null where nothing was held out."""
    delta_bytes: int
    total_bytes: int
    memory_bytes: int
    preprocessing: Preprocessing
    temperature: float


class ClassAnswer(BaseModel):
    label: str
    task: str


class ClassesAnswer(BaseModel):
    version: int
    classes: list[ClassAnswer]


class Move(BaseModel):
    """Why the channel is moved; kept in its history."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=500)] = ""


class RollbackMove(Move):
    """Without `to`, back to the version that the channel named before."""

    to: VersionNumber | None = None


class PromoteMove(Move):
    to: VersionNumber


class MovedAnswer(BaseModel):
    """Given when this server serves what the channel names."""

    version: int
    channel: str
    record: ChannelRecord


class HealthAnswer(BaseModel):
    status: str


class ReadyAnswer(BaseModel):
    """`error` says why the channel's head is not what is served. `head` is the version that the
    channel named when it was last read. `fallback`: it could not be loaded when the server started,
    and the newest one before it that could be is served. `engine` names the engine and why it was
    taken. `canary` and `shadow` are the versions that stand beside the served one; null where there
    is none, or it is not loaded yet."""

    version: int
    channel: str
    mode: Mode | None
    record: int | None
    head: int | None
    fallback: bool
    backend: str
    engine: str
    device: str
    canary: int | None
    shadow: int | None
    error: str | None


class ProblemAnswer(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
