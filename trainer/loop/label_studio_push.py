"""Import waiting pictures of the inbox into a project of Label Studio.

Pictures are uploaded as files of a second project, a batch at a time, and tasks name them. So a
labeller's browser needs only Label Studio and its login there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from model_store.errors import ItemNotFound, RecordInvalid
from model_store.loop.inbox import Inbox
from model_store.loop.index import Index, State
from model_store.loop.item_names import EXTENSIONS
from model_store.loop.items import labelled_items, open_index, read_items
from model_store.loop.label_studio_annotations import number_in
from model_store.loop.label_studio_tasks import (
    CLASSES,
    class_choices,
    is_model_version,
    item_of,
    kept_prediction,
    model_version,
    task_data,
)
from model_store.records.inbox import ItemRecord
from model_store.store.store import Store
from trainer.loop.label_studio_client import LabelStudio, LabelStudioFailed
from trainer.loop.label_studio_projects import (
    Project,
    ProjectChoice,
    find_pictures,
    find_project,
    tasks_of,
)

BATCH = 50
"""Pictures in one upload. Label Studio takes 100 files at most."""
WAITING: tuple[State, ...] = ("unlabelled", "wrong")


@dataclass(slots=True, kw_only=True)
class Pushed:
    """The tasks that were made, that existed before, and that got other classes."""

    project: Project
    classes: tuple[str, ...]
    pushed: int = 0
    there: int = 0
    refreshed: int = 0
    lost: int = 0
    """Items that were deleted meanwhile, or are damaged."""
    left: int = 0
    """Items that still wait because of the limit."""
    versions: set[int] = field(default_factory=set)
    """The versions that predictions are of."""

    def as_json(self) -> dict[str, Any]:
        return {
            "project": self.project.id,
            "title": self.project.title,
            "created": self.project.created,
            "pushed": self.pushed,
            "there": self.there,
            "refreshed": self.refreshed,
            "lost": self.lost,
            "left": self.left,
            "classes": len(self.classes),
        }


def push(
    server: LabelStudio, choice: ProjectChoice, *, store: Store, channel: str, limit: int
) -> Pushed:
    """Import the items that wait, the least certain first. Pushing again adds what is new."""
    inbox = Inbox(store.objects)
    index = open_index(inbox)
    project = find_project(server, choice, create=True)
    done = Pushed(project=project, classes=classes_of(store, channel, inbox, index))
    there = _refresh(server, done)
    waiting = index.page(order="uncertain", states=WAITING, limit=max(1, len(index))).rows
    done.there = sum(row.id in there for row in waiting)
    new = [row for row in waiting if row.id not in there]
    done.left = max(0, len(new) - limit)
    records = (item.record for item in read_items(inbox, new[:limit]))
    read = 0
    pictures = find_pictures(server, project) if new else 0
    for batch in _batches(records):
        read += len(batch)
        _push_batch(server, done, inbox, batch, pictures=pictures)
    done.lost += len(new[:limit]) - read
    _name_version(server, done)
    return done


def classes_of(store: Store, channel: str, inbox: Inbox, index: Index) -> tuple[str, ...]:
    """List the classes of the version that a channel names, and then the new names among the
    labels of the inbox."""
    head = store.head(channel)
    known = store.resolve(head).classes if head else ()
    named = {item.label for item in labelled_items(inbox, index)}
    return (*known, *sorted(named - set(known)))


def _refresh(server: LabelStudio, done: Pushed) -> set[str]:
    """Return the items that the project has tasks for, and give unlabelled tasks the newest
    classes."""
    there: set[str] = set()
    wanted = class_choices(done.classes)
    stale: list[dict[str, Any]] = []
    for task in tasks_of(server, done.project, fields="task_only"):
        data = task.get("data")
        item = item_of(data, image_key=done.project.controls.image_key)
        if item is None or not isinstance(data, dict):
            continue
        there.add(item)
        if CLASSES in data and data[CLASSES] != wanted and not task.get("total_annotations"):
            stale.append(task)
    for task in stale:
        data = {**task["data"], CLASSES: wanted}
        server.patch(f"/api/tasks/{number_in(task)}/", {"data": data})
        done.refreshed += 1
    return there


def _push_batch(
    server: LabelStudio,
    done: Pushed,
    inbox: Inbox,
    items: Sequence[ItemRecord],
    *,
    pictures: int,
) -> None:
    files: dict[str, tuple[str, bytes, str]] = {}
    kept: list[ItemRecord] = []
    for item in items:
        try:
            data = inbox.picture(item)
        except (ItemNotFound, RecordInvalid):
            done.lost += 1
            continue
        name = f"{item.id}.{EXTENSIONS[item.picture.type]}"
        files[f"file{len(kept)}"] = (name, data, item.picture.type)
        kept.append(item)
    if not kept:
        return
    addresses = _upload(server, pictures, files)
    tasks = []
    for item in kept:
        if item.id not in addresses:
            raise LabelStudioFailed(f"Label Studio does not list the picture {item.id} it was sent")
        tasks.append(_task(done, item, addresses[item.id]))
    server.post(f"/api/projects/{done.project.id}/import", tasks)
    done.pushed += len(tasks)


def _upload(
    server: LabelStudio, project: int, files: dict[str, tuple[str, bytes, str]]
) -> dict[str, str]:
    """Upload pictures, and return the address of each by the id of its item."""
    path = f"/api/projects/{project}"
    made = server.upload(f"{path}/import", files, commit_to_project="false")
    numbers = made.get("file_upload_ids") if isinstance(made, dict) else None
    if not isinstance(numbers, list):
        raise LabelStudioFailed(
            "Label Studio does not list the files that it was sent: the Enterprise edition, which "
            "imports later, is not supported"
        )
    listed = server.get(f"{path}/file-uploads", ids=json.dumps(numbers))
    addresses: dict[str, str] = {}
    for upload in listed if isinstance(listed, list) else ():
        address = f"/data/{upload.get('file', '')}" if isinstance(upload, dict) else ""
        item = item_of({"image": address})
        if item is not None:
            addresses[item] = address
    return addresses


def _task(done: Pushed, item: ItemRecord, address: str) -> dict[str, Any]:
    controls = done.project.controls
    data = task_data(item, image=address, classes=done.classes)
    data[controls.image_key] = data.pop("image")
    answer = kept_prediction(item, controls, classes=done.classes)
    if answer is not None:
        done.versions.add(item.version)
    return {"data": data, "predictions": [] if answer is None else [answer]}


def _name_version(server: LabelStudio, done: Pushed) -> None:
    """Make the project show predictions of the newest version. Label Studio chooses the next task
    by the scores of one version."""
    before = done.project.model_version
    if not done.versions or (before and not is_model_version(before)):
        return  # somebody has chosen another model
    newest = model_version(max(done.versions))
    if newest != before:
        server.patch(f"/api/projects/{done.project.id}/", {"model_version": newest})


def _batches(items: Iterable[ItemRecord]) -> Iterator[list[ItemRecord]]:
    waiting = iter(items)
    while batch := list(islice(waiting, BATCH)):
        yield batch
