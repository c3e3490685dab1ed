"""Define the JSON of the inbox, of feedback and of jobs.

For Label Studio 1.23, only the members that are read are defined; others may be anything.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dne_serve.http.schemas import NearImage, Score
from dne_serve.loop.trainer_child import BackboneAnswer
from model_store.loop.inbox import CLEAR, DISCARD, WRONG, Judgement
from model_store.loop.index import State
from model_store.loop.label_studio import MAX_CHARACTERS
from model_store.records.inbox import LabelKind
from model_store.records.jobs import BackboneName, JobKind
from model_store.report.advice import Advice, AdvisedImage

MAX_LABEL = 1000
"""Longer than any class name, so that the error of a long label names its real limit."""
ItemText = Annotated[str, Field(max_length=100)]
LabelText = Annotated[str, Field(max_length=MAX_LABEL)]


class AdviceLine(BaseModel):
    """A sentence of the advice, and the images that it concerns."""

    text: str
    images: list[AdvisedImage]


class ToldAdvice(Advice):
    """The advice, with the lines that people see."""

    lines: list[AdviceLine]


class AdviceAnswer(BaseModel):
    """The advice on a version; null if the trainer has written none, or a class of the version
    was forgotten."""

    version: int
    advice: ToldAdvice | None


class ExamplePicture(BaseModel):
    """A picture of at most 96 pixels a side: its media type, and its bytes in base64."""

    type: Literal["image/jpeg", "image/png"]
    data: str


class ExamplesAnswer(BaseModel):
    """A few kept images of a class, for comparison. `note` says why there are none."""

    version: int
    label: str
    pictures: list[ExamplePicture]
    note: str


class JudgementAnswer(BaseModel):
    """A statement about an item, and who made it. `label` is null unless `kind` is `label`."""

    number: int
    kind: LabelKind
    label: str | None
    actor: str
    time: str


class ItemAnswer(BaseModel):
    """A picture of the inbox and the answer to it. `label`, `score` and `top` are those of the
    version that answered. `version`, `label` and `score` are null for a picture that was taught.
    `other_label` is that of a shadow or of the served version, if it differs. `rules` are the
    reasons for keeping it. `number` is that of the newest label record, 0 for none; send it as
    `after` of the next one."""

    id: str
    time: str
    version: int | None
    channel: str
    label: str | None
    score: float | None
    margin: float
    top: list[Score]
    unknown: bool
    unknown_score: float | None
    other_version: int | None
    other_label: str | None
    rules: list[str]
    width: int
    height: int
    type: str
    bytes: int
    sha256: str
    dhash: str
    state: State
    number: int
    judgement: JudgementAnswer | None


class InboxAnswer(BaseModel):
    """A page of the inbox. `counts` are those of all items by state. `next_cursor` is the `cursor`
    of the next page, or null. `collecting` tells whether this server keeps pictures."""

    items: list[ItemAnswer]
    counts: dict[State, int]
    total: int
    next_cursor: str | None
    collecting: bool


class GroupAnswer(BaseModel):
    """Items that look alike, those nearest to the middle of the group first."""

    items: list[ItemAnswer]


class GroupsAnswer(BaseModel):
    """Groups of three items and more, large groups of unknown images first. `others` are the items
    that look like hardly any other. `by` is `tokens` if the version sees the images of a group as
    alike, and `labels` if they only have the same nearest class. `counts`, `total` and `collecting`
    are as in a page of the inbox."""

    groups: list[GroupAnswer]
    others: list[ItemAnswer]
    by: Literal["tokens", "labels"]
    counts: dict[State, int]
    total: int
    collecting: bool


class AlikeItem(BaseModel):
    """An item, and the cosine of its embedding and that of the item asked about."""

    similarity: float
    item: ItemAnswer


class AlikeAnswer(BaseModel):
    """Items of the inbox and kept images that look like an item to the served version, the likest
    first. Items without a token, such as taught ones, are not among them."""

    items: list[AlikeItem]
    kept: list[NearImage]


class ItemHistoryAnswer(ItemAnswer):
    """An item with all its label records, oldest first."""

    history: list[JudgementAnswer]


class LabelledAnswer(JudgementAnswer):
    """The label record that was written."""

    id: str


class TaughtPicture(BaseModel):
    """What became of a picture. `kept`: it is in the inbox with the label. `known`: the inbox had
    the same picture, which has the label now. `item` is null for all others: `bad` (it cannot be
    read), `other` (the same picture has another label), `refused` (there is no room, or no time;
    send it again). `why` says why."""

    filename: str | None
    outcome: Literal["kept", "known", "bad", "other", "refused"]
    item: str | None
    why: str


class TaughtAnswer(BaseModel):
    """The pictures in the order sent."""

    label: str
    pictures: list[TaughtPicture]


class DeletedAnswer(BaseModel):
    id: str
    deleted: bool


class LabelBody(BaseModel):
    """One of `label`, `wrong` (another class than the answer), `discard` (useless) and `clear`
    (takes the label back). `after` is the `number` that the client has seen: if somebody else has
    written since, the answer is 409. Without `after`, the record is written anyway."""

    model_config = ConfigDict(extra="forbid")

    label: LabelText | None = None
    wrong: bool = False
    discard: bool = False
    clear: bool = False
    after: Annotated[int, Field(ge=0, le=99_999_999)] | None = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        said = (self.label is not None, self.wrong, self.discard, self.clear)
        if sum(said) != 1:
            raise ValueError("say one of label, wrong, discard and clear")
        return self

    def judgement(self) -> Judgement:
        """Raise LabelInvalid for a label that cannot name a class."""
        if self.label is not None:
            return Judgement.of_class(self.label)
        return WRONG if self.wrong else DISCARD if self.discard else CLEAR


class FeedbackBody(BaseModel):
    """The `id` of a prediction, and either its true `label` or that it is `wrong`."""

    model_config = ConfigDict(extra="forbid")

    id: ItemText
    label: LabelText | None = None
    wrong: bool = False

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if (self.label is not None) == self.wrong:
            raise ValueError("say either label or wrong")
        return self

    def judgement(self) -> Judgement:
        """Raise LabelInvalid for a label that cannot name a class."""
        return Judgement.of_class(self.label) if self.label is not None else WRONG


JobStateName = Literal[
    "waiting", "running", "lost", "cancelling", "promoted", "refused", "failed", "cancelled"
]


class ClassCount(BaseModel):
    label: str
    images: int


class LeftLabel(BaseModel):
    """A label that cannot be learnt from yet, and the reason."""

    label: str
    why: str


class CorrectionAnswer(BaseModel):
    """A correction of the kept image with the digest `image`: it leaves the class `label` for `to`,
    or, where `to` is null, for none."""

    id: str
    image: str
    label: str
    to: str | None
    actor: str
    reason: str
    time: str


class CorrectionBody(BaseModel):
    """The kept image with the digest `image` leaves the class `label` for the class `to`; null: for
    none. `to` equal to `label` takes back what was said before."""

    model_config = ConfigDict(extra="forbid")

    image: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    label: LabelText
    to: LabelText | None
    reason: Annotated[str, Field(max_length=500)] = ""


class KeptImageAnswer(BaseModel):
    """An image that a version keeps: its digest and its name, and a picture of at most 96 pixels a
    side in base64; null if it cannot be decoded."""

    sha256: str
    name: str
    type: Literal["image/jpeg", "image/png"] | None
    data: str | None


class KeptAnswer(BaseModel):
    """Images that a version keeps of a class; `total` counts all of them."""

    version: int
    label: str
    total: int
    images: list[KeptImageAnswer]


class WaitingCorrection(CorrectionAnswer):
    """A correction that the channel's head has not learnt. `why` says why it cannot be, if so."""

    why: str | None


class WaitingAnswer(BaseModel):
    """Labels that neither the channel's head nor its ancestors have used. `known` classes will be
    extended, and `new` ones become a task. Corrections come first, in a version of their own."""

    known: list[ClassCount]
    new: list[ClassCount]
    left: list[LeftLabel]
    corrections: list[WaitingCorrection]


class MeasuredAnswer(BaseModel):
    """An accuracy on `images` held-out images, and the range of its 95 % interval."""

    share: float
    images: int
    low: float
    high: float


class JobVersionAnswer(BaseModel):
    """A version that a job has published. `refused` says why it was not promoted. `old_before` is
    the parent's accuracy on the classes that it knew, and `old_after` the version's. `corrected`
    counts the kept images that it moved or took out."""

    version: int
    parent: int | None
    promoted: bool
    refused: str | None
    reasons: list[str]
    verdict: str
    new_classes: list[str]
    extended: list[str]
    corrected: int
    old_before: MeasuredAnswer | None
    old_after: MeasuredAnswer | None
    new_after: MeasuredAnswer | None
    delta_bytes: int


class JobAnswer(BaseModel):
    """A job. `waiting`: no worker has it. `running`: `worker` has it, and `phase`, `share` and
    `seconds_left` are its progress. `lost`: its worker gives no sign of life, and the next one
    takes it over. `before` is the version that the channel named before. `said` is the reason of
    an end that is not a promotion."""

    id: str
    kind: JobKind
    channel: str
    reason: str
    actor: str
    time: str
    state: JobStateName
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
    that the channel names (`head`). `refused` says why no client can ask for a job here;
    with `pinned` a rollback holds the channel, and what is learnt is not promoted.
    `backbones` are those that the trainer beside the server knows, while there is no version."""

    jobs: list[JobAnswer]
    waiting: WaitingAnswer
    head: int | None
    pinned: bool = False
    refused: str | None
    backbones: list[BackboneAnswer]


class JobBody(BaseModel):
    """The `reason` is kept with the job. `kind`: learn from the labels that wait, or adapt the
    version that the channel names (`growth` of `GET /versions`). `pretrained` names the weights
    that a first task begins with: a known backbone, or owner/name on the Hugging Face Hub."""

    model_config = ConfigDict(extra="forbid")

    kind: JobKind = "learn-from-inbox"
    reason: Annotated[str, Field(max_length=500)] = ""
    pretrained: BackboneName | None = None


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
