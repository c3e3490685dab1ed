"""Write the annotations of a project of Label Studio as labels of the inbox."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from model_store.errors import ItemNotFound, LabelInvalid, LabelsFull
from model_store.loop.inbox import Inbox
from model_store.loop.label_studio_annotations import newest_first, read_annotation, take_annotation
from model_store.loop.label_studio_tasks import item_of
from model_store.store.store import Store
from trainer.loop.label_studio_client import LabelStudio
from trainer.loop.label_studio_projects import Project, ProjectChoice, find_project, tasks_of

MAX_TOLD = 20
"""Refused annotations that are listed one by one."""


@dataclass(slots=True, kw_only=True)
class Pulled:
    """The outcomes of annotations, and the reasons for refusing some."""

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


def pull(server: LabelStudio, choice: ProjectChoice, *, store: Store) -> Pulled:
    """Take the newest annotation of each task that is not cancelled. Another pull writes only what
    has changed since."""
    inbox = Inbox(store.objects)
    project = find_project(server, choice, create=False)
    done = Pulled(project=project)
    for task in tasks_of(server, project, fields="all"):
        item = item_of(task.get("data"), image_key=project.controls.image_key)
        annotations = task.get("annotations")
        if item is not None and isinstance(annotations, list) and annotations:
            _take(done, inbox, item, annotations)
    return done


def _take(done: Pulled, inbox: Inbox, item: str, annotations: list[Any]) -> None:
    """Take the newest annotation that names a class. Without one, skip the task."""
    outcome = "cancelled"
    for sent in newest_first(annotations):
        try:
            annotation = read_annotation(sent, done.project.controls, project=done.project.id)
            taken = take_annotation(inbox, item, annotation)
        except (LabelInvalid, LabelsFull) as error:
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
