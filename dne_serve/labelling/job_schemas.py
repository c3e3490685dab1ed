"""Define the JSON of jobs: labels that wait, progress, and the verdict."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

JobState = Literal[
    "waiting", "running", "lost", "cancelling", "promoted", "refused", "failed", "cancelled"
]


class ClassCount(BaseModel):
    label: str
    images: int


class LeftLabel(BaseModel):
    """A label that cannot be learnt from yet, and why."""

    label: str
    why: str


class WaitingAnswer(BaseModel):
    """Labels that no version behind the channel's head has used: `known` classes will be extended,
    and `new` ones become a task."""

    known: list[ClassCount]
    new: list[ClassCount]
    left: list[LeftLabel]


class MeasuredAnswer(BaseModel):
    """An accuracy on `images` held-out images, and the range of its 95 % interval."""

    share: float
    images: int
    low: float
    high: float


class JobVersionAnswer(BaseModel):
    """A version that a job has published. `refused` says why it was not promoted. `old_before` is
    the parent's accuracy on the classes that it knew, and `old_after` the version's."""

    version: int
    parent: int | None
    promoted: bool
    refused: str | None
    reasons: list[str]
    verdict: str
    new_classes: list[str]
    extended: list[str]
    old_before: MeasuredAnswer | None
    old_after: MeasuredAnswer | None
    new_after: MeasuredAnswer | None
    delta_bytes: int


class JobAnswer(BaseModel):
    """A job. `waiting`: no worker has it. `running`: `worker` has it, and `phase`, `share` and
    `seconds_left` tell how far it is. `lost`: its worker gives no sign of life, and the next one
    takes it over. `before` is the version that the channel named before. `said` is the reason of
    an end that is not a promotion."""

    id: str
    channel: str
    reason: str
    actor: str
    time: str
    state: JobState
    worker: str | None
    software: str | None
    claims: int
    phase: str | None
    share: float | None
    seconds_left: float | None
    log: list[str]
    ended: str | None
    said: str
    before: int | None
    versions: list[JobVersionAnswer]


class JobsAnswer(BaseModel):
    """The newest jobs of the served channel, the labels that wait for the next one, and the version
    that the channel names (`head`)."""

    jobs: list[JobAnswer]
    waiting: WaitingAnswer
    head: int | None


class JobBody(BaseModel):
    """The `reason` is kept with the job."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(max_length=500)] = ""
