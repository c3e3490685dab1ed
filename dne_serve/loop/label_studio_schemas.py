"""Define the JSON that Label Studio 1.23 sends to an ML backend, as far as it is read, and the
answers to it. Members that are not read may be anything."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from model_store.loop.label_studio import MAX_CHARACTERS

MAX_TASKS = 10_000
"""Label Studio sends all tasks that a person has selected in one request."""
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
"""A list that reports only its first fault: a body may have a fault in each of 100,000 entries."""
LabelConfig = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class BackendHealthAnswer(BaseModel):
    """`model_class` is the name that Label Studio shows."""

    status: str
    model_class: str


class SetupBody(BaseModel):
    """A project that connects, or wants to know the version. `schema` is its label config."""

    label_config: Annotated[LabelConfig, Field(alias="schema")]


class SetupAnswer(BaseModel):
    """`model_version` names the served version. Label Studio asks for predictions of tasks that
    have none of it."""

    model_version: str


class BackendTask(BaseModel):
    """A task. Its data names an item of the inbox, as those of `dne-train label-studio push` do."""

    data: dict[str, Any]


class BackendPredictBody(BaseModel):
    tasks: Annotated[list[BackendTask], Field(max_length=MAX_TASKS, fail_fast=True)]
    label_config: LabelConfig


class ChoiceValue(BaseModel):
    choices: list[str]


class ChoiceRegion(BaseModel):
    from_name: str
    to_name: str
    type: str
    value: ChoiceValue
    score: float


class TaskPrediction(BaseModel):
    """The prediction of a task; or an `error` alone, which Label Studio logs, and keeps nothing."""

    result: list[ChoiceRegion] | None = None
    score: float | None = None
    model_version: str | None = None
    error: str | None = None


class BackendPredictAnswer(BaseModel):
    """One result for each task, in the order sent."""

    results: list[TaskPrediction]


class WebhookBody(BaseModel):
    """An event. `annotation` and `task` are two objects, or two lists of the same length. A
    deletion has `annotations` with ids only."""

    action: Annotated[str, Field(max_length=100)]
    annotation: dict[str, Any] | Objects | None = None
    task: dict[str, Any] | Objects | None = None
    annotations: Objects = []
    project: dict[str, Any] = {}


class WebhookOutcome(BaseModel):
    """Outcome of an annotation. `item` is null if no item of the inbox is meant."""

    annotation: int | None
    item: str | None
    outcome: str


class WebhookAnswer(BaseModel):
    outcomes: list[WebhookOutcome]
