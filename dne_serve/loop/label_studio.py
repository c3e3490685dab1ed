"""Serve Label Studio's ML backend: predict its tasks, and take its annotations as labels.

All routes need the scope `label`. Only pictures of the inbox get predictions. Nothing is fetched,
whatever address a task has.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from dne_serve.access.permission import Permission
from dne_serve.errors import NotReady, TooLarge, public_message
from dne_serve.http.bodies import BodyKind
from dne_serve.http.openapi import BASIC, problems
from dne_serve.http.scoped_route import (
    FACTS,
    SECURITY,
    Parts,
    ScopedRoute,
    actor_of,
    json_only,
    only_reading,
    taking,
)
from dne_serve.inference.decoding import EncodedImage
from dne_serve.inference.store_threads import check_wanted
from dne_serve.loop.inbox_handle import InboxHandle
from dne_serve.loop.schemas import (
    BackendHealthAnswer,
    BackendPredictAnswer,
    BackendPredictBody,
    SetupAnswer,
    SetupBody,
    WebhookAnswer,
    WebhookBody,
    WebhookOutcome,
)
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.errors import (
    ImageRejected,
    ItemNotFound,
    LabelConflict,
    LabelInvalid,
    LabelsFull,
    RecordInvalid,
    StoreUnsupported,
)
from model_store.loop.inbox import CLEAR, Inbox
from model_store.loop.items import in_threads, read_items
from model_store.loop.label_studio import (
    Controls,
    is_from,
    is_same_picture,
    item_of,
    key_of,
    model_version,
    number_in,
    prediction,
    read_annotation,
    read_label_config,
    take_annotation,
)
from model_store.records.inbox import ItemRecord, LabelRecord

_NOT_OURS = "no image of the inbox is named by this task: `dne-train label-studio push` makes tasks"
_ANNOTATED = frozenset({"ANNOTATION_CREATED", "ANNOTATIONS_CREATED", "ANNOTATION_UPDATED"})
DELETED = "ANNOTATIONS_DELETED"
MAX_ANNOTATIONS = 500

log = logging.getLogger("dne_serve.loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskPicture:
    """The item of a task, with its picture unless the served version has answered it before."""

    item: ItemRecord
    picture: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskPredictor:
    """Predicts the tasks of one request, all with one version."""

    serving: Serving
    chosen: Chosen
    controls: Controls

    async def answer(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Predict the tasks in order, in batches of as many images as a request may have."""
        size = self.serving.settings.max_images
        results: list[dict[str, Any]] = []
        for start in range(0, len(tasks), size):
            results += await self._answer_batch(tasks[start : start + size])
        return results

    async def _answer_batch(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        inbox = self.serving.inbox_handle.inbox
        entries = await self.serving.readers.run(
            lambda: list(in_threads(lambda task: self._find(inbox, task), tasks))
        )
        pictures = [
            entry.picture for entry in entries if isinstance(entry, _TaskPicture) and entry.picture
        ]
        scored = iter(await self._score(pictures))
        return [self._result(entry, scored) for entry in entries]

    def _find(self, inbox: Inbox, data: dict[str, Any]) -> _TaskPicture | str:
        """Find the item of a task, or return the reason why there is none."""
        name = item_of(data, image_key=self.controls.image_key)
        if name is None:
            return _NOT_OURS
        try:
            item = inbox.item(name)
            if not is_same_picture(data, item):
                return f"the task is about another picture than item {name} has"
            is_known = item.version == self.chosen.resident.version
            return _TaskPicture(item=item, picture=None if is_known else inbox.picture(item))
        except (ItemNotFound, RecordInvalid, StoreUnsupported) as error:
            return public_message(error)

    async def _score(self, pictures: Sequence[bytes]) -> list[tuple[str, float] | str]:
        """Compute the likeliest class of each picture, or return the reason why it has none."""
        if not pictures:
            return []
        uploads = [EncodedImage(filename=None, data=picture) for picture in pictures]
        try:
            scored = await self.serving.predictor.score(
                self.chosen, pictures=uploads, is_traffic=False
            )
        except ImageRejected as error:
            if len(pictures) == 1:
                return [public_message(error)]
            return [answer for picture in pictures for answer in await self._score([picture])]
        resident, answers = self.chosen.resident, list[tuple[str, float] | str]()
        for image in scored:
            best = int(image.probabilities.argmax())
            answers.append((resident.labels[best], float(image.probabilities[best])))
        return answers

    def _result(
        self, entry: _TaskPicture | str, scored: Iterator[tuple[str, float] | str]
    ) -> dict[str, Any]:
        if isinstance(entry, str):
            return {"error": entry}
        answer = next(scored) if entry.picture else _kept(entry.item)
        if isinstance(answer, str):
            return {"error": answer}
        label, score = answer
        if not self.controls.offers(label):
            return {
                "error": f"the project does not offer the class {label!r}: "
                'use <Choices … value="$classes">, which takes the classes from the task'
            }
        version = self.chosen.resident.version
        return prediction(self.controls, label=label, score=score, version=version)


def _kept(item: ItemRecord) -> tuple[str, float]:
    return item.top[0].label, item.top[0].score


@dataclass(frozen=True, slots=True, kw_only=True)
class _WebhookEvent:
    """An event that `actor` has sent. `on_written` is called with each label record.

    The deletion of annotations gives only their ids. Their items are then found by the actor of the
    newest label record, which names project and annotation. The work stops between two annotations
    when the client has gone.
    """

    inbox_handle: InboxHandle
    actor: str
    body: WebhookBody
    on_written: Callable[[LabelRecord], None]
    _known: dict[str, list[LabelRecord]] = field(default_factory=lambda: defaultdict(list))
    """Records by item: an event may contain many annotations of one item."""

    def take(self) -> list[WebhookOutcome]:
        """Write label records. After the valid annotations, raise one LabelInvalid for all those
        without a valid class, or for an item with too many labels. Ignore other kinds of events."""
        self._check_count()
        if self.body.action == DELETED:
            return list(self._clear())
        if self.body.action not in _ANNOTATED:
            return []
        controls = read_label_config(str(self.body.project.get("label_config", "")))
        outcomes: list[WebhookOutcome] = []
        refused: list[str] = []
        for annotation, task in _pairs(self.body):
            check_wanted()
            try:
                outcomes.append(self._take(annotation, task, controls))
            except LabelInvalid as error:
                refused.append(str(error))
        if refused:
            log.warning("Label Studio sent a label that cannot be taken: %s", refused[0])
            raise LabelInvalid("; ".join(refused[:5]))
        return outcomes

    def _check_count(self) -> None:
        count = max(len(_listed(self.body.annotation)), len(self.body.annotations))
        if count > MAX_ANNOTATIONS:
            raise TooLarge(
                f"the event has {count} annotations, and at most {MAX_ANNOTATIONS} fit: "
                "`dne-train label-studio pull` takes any number"
            )

    @property
    def _project(self) -> int:
        project = number_in(self.body.project)
        if project is None:
            raise LabelInvalid("the event names no project: let the webhook send its payload")
        return project

    def _take(
        self, sent: dict[str, Any], task: dict[str, Any], controls: Controls
    ) -> WebhookOutcome:
        annotation = read_annotation(sent, controls, project=self._project)
        item = item_of(task.get("data"), image_key=controls.image_key)
        if item is None:
            return WebhookOutcome(annotation=annotation.id, item=None, outcome="not of the inbox")
        try:
            taken = take_annotation(
                self.inbox_handle.inbox,
                item,
                annotation,
                via=f"{self.actor} ",
                known=self._known[item],
            )
        except ItemNotFound:
            return WebhookOutcome(annotation=annotation.id, item=None, outcome="not of the inbox")
        except (LabelInvalid, LabelsFull) as error:
            raise LabelInvalid(f"annotation {annotation.id}: {error}") from error
        if taken.record is not None:
            self.on_written(taken.record)
        return WebhookOutcome(annotation=annotation.id, item=item, outcome=taken.outcome)

    def _clear(self) -> Iterator[WebhookOutcome]:
        """Clear the labels of deleted annotations, unless the item has a newer label."""
        numbers = {number_in(annotation) for annotation in self.body.annotations} - {None}
        keys = {key_of(self._project, number): number for number in numbers if number}
        inbox, index = self.inbox_handle.inbox, self.inbox_handle.index
        index.refresh(whole=True)  # another server may have written the labels
        rows = index.rows(["labelled"]) if keys else []
        for item in read_items(inbox, rows):
            head = item.head
            key = f"#{head.actor.rpartition('#')[2]}" if head else ""
            if head is None or key not in keys or not is_from(head, key):
                continue
            check_wanted()
            actor = f"{self.actor} label-studio:deleted{key}"
            try:
                record = inbox.judge(head.item, CLEAR, actor=actor, after=head.number)
            except (LabelConflict, ItemNotFound):
                continue  # the item has a newer label, or is gone
            self.on_written(record)
            yield WebhookOutcome(annotation=keys[key], item=head.item, outcome="cleared")


def _pairs(body: WebhookBody) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair annotations with their tasks."""
    annotations = _listed(body.annotation)
    tasks = _listed(body.task)
    if not annotations or len(annotations) != len(tasks):
        raise LabelInvalid("the event has no annotation and task: let the webhook send its payload")
    yield from zip(annotations, tasks, strict=True)


def _listed(sent: dict[str, Any] | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if sent is None:
        return []
    return sent if isinstance(sent, list) else [sent]


class _BackendRoute(ScopedRoute):
    """A route that needs the scope `label`. The token is the password of Basic authentication, or a
    Bearer token. No other route takes Basic: a browser would send it along by itself."""

    needs = Permission.LABEL

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        security = [*SECURITY[self.needs], {BASIC: []}]
        options["openapi_extra"] = {"security": security, **(options.get("openapi_extra") or {})}
        super().__init__(path, endpoint, **options)

    def _authorization(self, scope: Scope) -> str | None:
        return as_bearer(super()._authorization(scope))


def as_bearer(authorization: str | None) -> str | None:
    """Turn Basic authentication into a Bearer token, and ignore the name of the user. Return any
    other header as it is."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(given.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return f"Bearer {decoded.partition(':')[2]}"


CONFIG = BodyKind(max_bytes=2 << 20)
"""A label config of a million characters, with those that JSON escapes."""
TASKS = BodyKind(max_bytes=16 << 20, max_json_values=400_000)
"""Ten thousand tasks with their data: 1.6 kB and 40 values each."""
EVENT = BodyKind(max_bytes=4 << 20)
"""An event of 500 annotations with their tasks: 8 kB and 200 values each."""

backend = APIRouter(
    prefix="/label-studio",
    route_class=_BackendRoute,
    dependencies=[Depends(json_only)],
    responses=problems(400, 503),
    tags=["label studio"],
)


@backend.get("/health")
async def backend_health() -> BackendHealthAnswer:
    """Confirm that the backend is running, and that the token is valid."""
    return BackendHealthAnswer(status="UP", model_class="dne-serve")


@backend.post("/setup", responses=problems(415))
@taking(CONFIG)
@only_reading
async def setup(serving: Parts, body: SetupBody) -> SetupAnswer:
    """Check the label config of a project, and name the served version."""
    await _read_config(body.label_config)
    return SetupAnswer(model_version=model_version(_served(serving).resident.version))


@backend.post(
    "/predict",
    responses=problems(415),
    response_model_exclude_none=True,
    response_model=BackendPredictAnswer,
)
@taking(TASKS)
@only_reading
async def predict_tasks(
    serving: Parts, body: BackendPredictBody
) -> dict[str, list[dict[str, object]]]:
    """Predict the classes of tasks with images of the inbox. No address is followed, and a task
    with any other image gets an error of its own."""
    controls = await _read_config(body.label_config)
    answering = _TaskPredictor(serving=serving, chosen=_served(serving), controls=controls)
    return {"results": await answering.answer([task.data for task in body.tasks])}


@backend.post("/webhook", responses=problems(415, 422))
@taking(EVENT)
def webhook(request: Request, serving: Parts, body: WebhookBody) -> WebhookAnswer:
    """Take created, updated and deleted annotations as labels of the inbox, at most 500 in an
    event. Cancelled annotations are skipped."""
    facts = request.scope[FACTS]
    facts.update(event=body.action, records=0)

    def written(record: LabelRecord) -> None:
        serving.inbox_handle.index.judged(record)
        facts["records"] += 1

    event = _WebhookEvent(
        inbox_handle=serving.inbox_handle,
        actor=actor_of(request),
        body=body,
        on_written=written,
    )
    return WebhookAnswer(outcomes=event.take())


async def _read_config(text: str) -> Controls:
    """Parse XML off the event loop: a config of a million characters takes time."""
    return await run_in_threadpool(read_label_config, text)


def _served(serving: Serving) -> Chosen:
    """Choose the served version, which `setup` names, and never a canary."""
    served = serving.loaded.served
    if served is None:
        raise NotReady("no version is served yet")
    return Chosen(resident=served, by="asked")
