"""Define the JSON of requests and answers, as the OpenAPI document shows it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from model_store.records.channel import ChannelRecord, Mode
from model_store.records.describe import Verdict
from model_store.records.manifest import Preprocessing, ShardRef
from model_store.records.quality import Accuracy, Calibration, Metrics, Unknown
from model_store.records.sealing import MAX_VERSION

VersionNumber = Annotated[int, Field(ge=1, le=MAX_VERSION)]


class JsonImage(BaseModel):
    """One image with a name. `data` is base64, plain or as a data URL."""

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


class NearImage(BaseModel):
    """A kept image that is near in embedding space: its class, the cosine of the embeddings, its
    digest and its name."""

    label: str
    similarity: float
    image: str
    name: str


class Prediction(BaseModel):
    """Classes of one image. `score` is the calibrated probability over the version's classes.
    `unknown`: the image is probably of none of the classes, and `label` is only the nearest.
    `unknown_score`: the probability of none of the classes, if half of all images were; null for a
    version whose `unknown.score` is `max-logit`.
    `level`: 0 for a class; where every class is in doubt and a group of them is not, `label` and
    `score` are those of the group, so many steps above its likeliest class, which `top` names.
    `id`: names the picture for `POST /feedback`; only there while the server collects pictures.
    `why`: the nearest kept images, if they were asked for."""

    filename: str | None
    label: str
    score: float
    level: int
    task: str
    unknown: bool
    unknown_score: float | None
    top: list[Score]
    id: str | None = None
    why: list[NearImage] | None = None


class Embedding(BaseModel):
    filename: str | None
    embedding: list[float]


class EmbeddingSpace(BaseModel):
    """The space of a version's embeddings. Those of the same `expert` can be compared by their
    cosine."""

    version: int
    expert: str
    width: int


class EmbeddingsAnswer(EmbeddingSpace):
    """The embeddings of the images in the order sent."""

    embeddings: list[Embedding]


class PredictAnswer(BaseModel):
    """Answers for all images of a request, in the order sent, by one version. `canary`: the version
    is the one that answers a share of the requests beside the served one."""

    version: int
    canary: bool
    predictions: list[Prediction]


class Likely(BaseModel):
    """Ends of the 95 % intervals (Wilson) of accuracies; null where the number of images is not
    recorded."""

    all: tuple[float, float] | None = None
    old: tuple[float, float] | None = None
    new: tuple[float, float] | None = None


class VersionSummary(BaseModel):
    """One row of the list. `error` says why a version cannot be read; then the rest is empty.
    `change` is the change that the version made. `verdict` is the sentence of the gate, `gate` its
    first word, and `reasons` are the sentences against the version."""

    version: int
    parent: int | None = None
    created: str | None = None
    tasks: int = 0
    classes: int = 0
    new_classes: list[str] = []
    accuracy: Accuracy = Accuracy()
    likely: Likely = Likely()
    delta_bytes: int = 0
    total_bytes: int = 0
    change: str = ""
    gate: Verdict | None = None
    verdict: str = ""
    reasons: list[str] = []
    error: str | None = None


class GrowthAnswer(BaseModel):
    """A proposal to adapt the version that the channel names: the prospect in one sentence."""

    version: int
    says: str


class VersionsAnswer(BaseModel):
    """A page of versions in ascending order. `next_before` is the `before` of the page with older
    versions, or null. `history` has the newest records of the channel, and `problems` the faults
    of records that cannot be read. `moves_refused` says why no client can move the channel here.
    `growth` proposes what `POST /jobs` with the kind `grow` does; null where little is to win, and
    where it was done or tried."""

    served: int | None
    channel: str
    mode: Mode | None
    moves_refused: str | None
    versions: list[VersionSummary]
    total: int
    next_before: int | None
    history: list[ChannelRecord]
    problems: list[str]
    growth: GrowthAnswer | None


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
    """Public key of the signature. `--require-signatures` decides whether it is trusted."""
    tasks: list[TaskAnswer]
    classes: list[str]
    retired: list[str]
    """Classes that this version never answers."""
    parents: dict[str, str]
    """The group of each class, and of each group that has one above it."""
    extended: list[str]
    """Classes that got more images in this version, which then has no new task."""
    corrected: int
    """Kept images of these classes that this version moved or took out instead."""
    deepened: list[str]
    """Tasks that an expert was learnt for in this version, which then has no new task."""
    adapted: bool
    """True: the first expert was changed in this version, which then has no new task."""
    shards: list[ShardRef]
    metrics: Metrics
    verdict: str
    """Verdict of the gate in one line."""
    calibration: Calibration
    unknown: Unknown | None
    """Rule that finds images of none of the classes; null if no images were held out."""
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
    """Request to move the channel. Its history keeps the `reason`."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=500)] = ""


class RollbackMove(Move):
    """Request to roll back to `to`, or to the version that the channel named before."""

    to: VersionNumber | None = None


class PromoteMove(Move):
    to: VersionNumber


class MovedAnswer(BaseModel):
    """Version that this server serves after the channel was moved, and the record of the move."""

    version: int
    channel: str
    record: ChannelRecord


class HealthAnswer(BaseModel):
    status: str


class ReadyAnswer(BaseModel):
    """State of the server. `error` says why the channel's head is not served. `head` is the version
    that the channel named when it was last read. `fallback`: the head could not be loaded at the
    start, and the newest earlier version that could be loaded is served. `settling` is a version in
    memory that is served when its record is old enough. `engine` names the engine and why it was
    taken; while `measuring`, others are measured, and a faster one takes its place. `canary` and
    `shadow` are the versions beside the served one; null if there is none, or it is not loaded
    yet."""

    version: int
    channel: str
    mode: Mode | None
    record: int | None
    head: int | None
    fallback: bool
    settling: int | None
    backend: str
    engine: str
    measuring: bool
    device: str
    canary: int | None
    shadow: int | None
    error: str | None


class ModelsReadyAnswer(BaseModel):
    """State of a server with many models. `loaded` counts those in memory; `default` is the model
    that routes without a name ask."""

    loaded: int
    default: str | None
    backend: str
    engine: str
    measuring: bool
    device: str


class ProblemAnswer(BaseModel):
    """A problem document of RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
