"""Write the annotations that a webhook of Label Studio tells of as labels of the inbox.

A deletion tells ids alone. The item is then found by the actor of its newest label record, which
names project and annotation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dne_serve.collecting.desk import Desk
from dne_serve.label_studio.schemas import WebhookBody, WebhookOutcome
from model_store.errors import ItemNotFound, LabelConflict, LabelInvalid
from model_store.inbox.inbox import CLEAR
from model_store.inbox.reading import read_items
from model_store.label_studio.annotations import (
    is_from,
    key_of,
    number_in,
    read_annotation,
    take,
)
from model_store.label_studio.label_config import Controls, read_label_config
from model_store.label_studio.tasks import item_of

SAID = frozenset({"ANNOTATION_CREATED", "ANNOTATIONS_CREATED", "ANNOTATION_UPDATED"})
DELETED = "ANNOTATIONS_DELETED"

log = logging.getLogger("dne_serve.label_studio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """One event, told by `actor`."""

    desk: Desk
    actor: str
    body: WebhookBody

    def hear(self) -> list[WebhookOutcome]:
        """Write records. Annotations that name no valid class are refused together, after all
        others were written. Events of other kinds come to nothing."""
        if self.body.action == DELETED:
            return list(self._clear())
        if self.body.action not in SAID:
            return []
        controls = read_label_config(str(self.body.project.get("label_config", "")))
        outcomes: list[WebhookOutcome] = []
        refused: list[str] = []
        for annotation, task in _pairs(self.body):
            try:
                outcomes.append(self._take(annotation, task, controls))
            except LabelInvalid as error:
                refused.append(str(error))
        if refused:
            log.warning("Label Studio told of a class that is none: %s", refused[0])
            raise LabelInvalid("; ".join(refused[:5]))
        return outcomes

    @property
    def _project(self) -> int:
        project = number_in(self.body.project)
        if project is None:
            raise LabelInvalid("the event names no project: let the webhook send its payload")
        return project

    def _take(
        self, found: dict[str, Any], task: dict[str, Any], controls: Controls
    ) -> WebhookOutcome:
        annotation = read_annotation(found, controls, project=self._project)
        item = item_of(task.get("data"), image_key=controls.image_key)
        if item is None:
            return WebhookOutcome(annotation=annotation.id, item=None, outcome="not of the inbox")
        try:
            taken = take(self.desk.inbox, item, annotation, via=f"{self.actor} ")
        except ItemNotFound:
            return WebhookOutcome(annotation=annotation.id, item=None, outcome="not of the inbox")
        except LabelInvalid as error:
            raise LabelInvalid(f"annotation {annotation.id}: {error}") from error
        if taken.record is not None:
            self.desk.index.judged(taken.record)
        return WebhookOutcome(annotation=annotation.id, item=item, outcome=taken.outcome)

    def _clear(self) -> Iterator[WebhookOutcome]:
        """Take back the labels of deleted annotations, unless somebody has labelled since."""
        numbers = {number_in(one) for one in self.body.annotations} - {None}
        keys = {key_of(self._project, number): number for number in numbers if number}
        inbox, index = self.desk.inbox, self.desk.index
        index.refresh(whole=True)  # another server may have written the labels
        rows = index.rows(["labelled"]) if keys else []
        for item in read_items(inbox, rows):
            head = item.head
            key = f"#{head.actor.rpartition('#')[2]}" if head else ""
            if head is None or key not in keys or not is_from(head, key):
                continue
            actor = f"{self.actor} label-studio:deleted{key}"
            try:
                record = inbox.judge(head.item, CLEAR, actor=actor, after=head.number)
            except (LabelConflict, ItemNotFound):
                continue  # somebody was faster, and the newest word counts
            index.judged(record)
            yield WebhookOutcome(annotation=keys[key], item=head.item, outcome="cleared")


def _pairs(body: WebhookBody) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair annotations with their tasks."""
    annotations = _listed(body.annotation)
    tasks = _listed(body.task)
    if not annotations or len(annotations) != len(tasks):
        raise LabelInvalid("the event has no annotation and task: let the webhook send its payload")
    yield from zip(annotations, tasks, strict=True)


def _listed(found: dict[str, Any] | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if found is None:
        return []
    return found if isinstance(found, list) else [found]
