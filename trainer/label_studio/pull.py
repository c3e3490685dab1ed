"""Write the annotations of a project of Label Studio as labels of the inbox."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from model_store.errors import ItemNotFound, LabelInvalid
from model_store.inbox.inbox import Inbox
from model_store.label_studio.annotations import newest_first, read_annotation, take
from model_store.label_studio.tasks import item_of
from model_store.store.store import Store
from trainer.label_studio.client import LabelStudio
from trainer.label_studio.projects import Project, find_project, tasks_of
from trainer.label_studio.request import Chosen

MAX_TOLD = 20
"""Refused annotations that are told one by one."""


@dataclass(slots=True, kw_only=True)
class Pulled:
    """The outcomes of annotations, and why some were refused."""

    project: Project
    outcomes: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        names = ("labelled", "cleared", "already", "overtaken", "cancelled", "empty", "gone")
        return {
            "project": self.project.id,
            "title": self.project.title,
            **{name: self.outcomes[name] for name in names},
            "classes": dict(sorted(self.classes.items())),
            "refused": self.refused[:MAX_TOLD],
        }


def pull(server: LabelStudio, chosen: Chosen, *, store: Store) -> Pulled:
    """Take the newest annotation of each task that is not cancelled. Pulling again writes what has
    changed since."""
    inbox = Inbox(store.objects)
    project = find_project(server, chosen, create=False)
    done = Pulled(project=project)
    for task in tasks_of(server, project, fields="all"):
        item = item_of(task.get("data"), image_key=project.controls.image_key)
        annotations = task.get("annotations")
        if item is not None and isinstance(annotations, list) and annotations:
            _take(done, inbox, item, annotations)
    return done


def _take(done: Pulled, inbox: Inbox, item: str, annotations: list[Any]) -> None:
    """Take the newest annotation that names a class; without one, pass the task over."""
    outcome = "cancelled"
    for found in newest_first(annotations):
        try:
            annotation = read_annotation(found, done.project.controls, project=done.project.id)
            taken = take(inbox, item, annotation)
        except LabelInvalid as error:
            done.refused.append(f"item {item}: {error}")
            return
        except ItemNotFound:
            outcome = "gone"
            break
        outcome = taken.outcome
        if taken.record is not None and taken.record.label is not None:
            done.classes[taken.record.label] += 1
        if outcome not in ("cancelled", "empty"):
            break
    done.outcomes[outcome] += 1
