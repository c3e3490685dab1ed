"""Exchange pictures and labels of the inbox with a project of Label Studio.

`push` imports waiting pictures with predictions. Pictures are uploaded as files of a second
project, and tasks name them: a labeller's browser needs only Label Studio and its login there.
`pull` writes annotations as labels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from model_store.errors import (
    ItemNotFound,
    LabelConfigInvalid,
    LabelInvalid,
    LabelsFull,
    RecordInvalid,
    WrongUsage,
)
from model_store.loop.inbox import Inbox
from model_store.loop.index import Index, State
from model_store.loop.item_names import EXTENSIONS
from model_store.loop.items import labelled_items, open_index, read_items
from model_store.loop.label_studio import (
    CLASSES,
    LABEL_CONFIG,
    Controls,
    class_choices,
    is_model_version,
    item_of,
    kept_prediction,
    model_version,
    newest_first,
    number_in,
    read_annotation,
    read_label_config,
    take_annotation,
    task_data,
)
from model_store.records.inbox import ItemRecord
from model_store.store.store import Store
from trainer.loop.label_studio_client import LabelStudio, LabelStudioFailed

PAGE = 100
_MAX_PAGES = 10_000
DESCRIPTION = "Pictures of the inbox of dne-serve. Push and pull with `dne-train label-studio`."
_PICTURES_CONFIG = '<View><Image name="image" value="$image"/></View>'


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectChoice:
    """The project: by its number, or by its title."""

    project: int | None
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project whose label config gives an image a class."""

    id: int
    title: str
    controls: Controls
    model_version: str
    created: bool = False


def _find_project(server: LabelStudio, choice: ProjectChoice, *, create: bool) -> Project:
    """Find the chosen project. Raise WrongUsage if there is none, or more than one."""
    if choice.project is not None:
        try:
            return _project(server.get(f"/api/projects/{choice.project}/"))
        except LabelStudioFailed as error:
            if error.status != 404:
                raise
            raise WrongUsage(
                f"Label Studio at {server.url} has no project {choice.project} for this token"
            ) from error
    listed = _listed(server, choice.title)
    projects = [project for project in listed if project.get("title") == choice.title]
    if len(projects) > 1:
        numbers = ", ".join(str(project.get("id")) for project in projects)
        raise WrongUsage(
            f"several projects have the title {choice.title!r}: choose one with `project` "
            f"({numbers})"
        )
    if projects:
        return _project(server.get(f"/api/projects/{number_in(projects[0])}/"))
    if not create:
        raise WrongUsage(
            f"Label Studio at {server.url} has no project with the title {choice.title!r}: "
            "`dne-train label-studio push` makes one"
        )
    body = {
        "title": choice.title,
        "description": DESCRIPTION,
        "label_config": LABEL_CONFIG,
        "sampling": "Uncertainty sampling",
        "show_collab_predictions": True,
    }
    return _project(server.post("/api/projects/", body), created=True)


def _find_pictures(server: LabelStudio, project: Project) -> int:
    """Find or create the project that holds the files of the pictures. Label Studio accepts files
    only for a project whose label config reads one key of the data, and ours reads two."""
    title = f"{project.title}: pictures"[-50:]
    for listed in _listed(server, title):
        number = number_in(listed)
        if listed.get("title") == title and number is not None:
            return number
    body = {
        "title": title,
        "description": f"Files of the pictures of project {project.id}, which shows them. It has "
        "no tasks. Do not delete it.",
        "label_config": _PICTURES_CONFIG,
    }
    made = number_in(server.post("/api/projects/", body))
    if made is None:
        raise LabelStudioFailed("Label Studio describes a project without an id")
    return made


def tasks_of(server: LabelStudio, project: Project, *, fields: str) -> Iterator[dict[str, Any]]:
    """Yield all tasks of a project; with `fields` as "all" also their annotations."""
    seen = 0
    for page in range(1, _MAX_PAGES + 1):
        answer = server.get(
            "/api/tasks/",
            project=project.id,
            page=page,
            page_size=PAGE,
            fields=fields,
            resolve_uri="false",
        )
        tasks = answer.get("tasks") if isinstance(answer, dict) else None
        if not isinstance(tasks, list):
            raise LabelStudioFailed(f"{server.url} lists tasks in a form that is not understood")
        for task in tasks:
            server.left_s()  # writing labels takes time too
            if isinstance(task, dict):
                yield task
        seen += len(tasks)
        total = answer.get("total") or 0
        if not isinstance(total, int):
            raise LabelStudioFailed(f"{server.url} counts tasks in a form that is not understood")
        if not tasks or seen >= total:
            return


def _listed(server: LabelStudio, title: str) -> list[dict[str, Any]]:
    answer = server.get("/api/projects/", title=title, page_size=PAGE)
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise LabelStudioFailed(f"{server.url} lists projects in a form that is not understood")
    return [project for project in results if isinstance(project, dict)]


def _project(answer: Any, *, created: bool = False) -> Project:
    number = number_in(answer)
    if number is None or not isinstance(answer, dict):
        raise LabelStudioFailed("Label Studio describes a project without an id")
    try:
        controls = read_label_config(str(answer.get("label_config", "")))
    except LabelConfigInvalid as error:
        raise LabelConfigInvalid(f"project {number} does not fit: {error}") from error
    return Project(
        id=number,
        title=str(answer.get("title", "")),
        controls=controls,
        model_version=str(answer.get("model_version") or ""),
        created=created,
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
    project = _find_project(server, choice, create=True)
    done = Pushed(project=project, classes=classes_of(store, channel, inbox, index))
    there = _refresh(server, done)
    waiting = index.page(order="uncertain", states=WAITING, limit=max(1, len(index))).rows
    done.there = sum(row.id in there for row in waiting)
    new = [row for row in waiting if row.id not in there]
    done.left = max(0, len(new) - limit)
    records = (item.record for item in read_items(inbox, new[:limit]))
    read = 0
    pictures = _find_pictures(server, project) if new else 0
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
    if answer is not None and item.version is not None:
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
    project = _find_project(server, choice, create=False)
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
