"""Find or create the project of Label Studio, and list its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_store.errors import LabelConfigInvalid, WrongUsage
from model_store.label_studio.annotations import number_in
from model_store.label_studio.label_config import LABEL_CONFIG, Controls, read_label_config
from trainer.label_studio.client import LabelStudio, LabelStudioFailed
from trainer.label_studio.request import Chosen

PAGE = 100
MAX_PAGES = 10_000
DESCRIPTION = "Pictures of the inbox of dne-serve. Push and pull with `dne-train label-studio`."
PICTURES_CONFIG = '<View><Image name="image" value="$image"/></View>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project whose label config gives an image a class."""

    id: int
    title: str
    controls: Controls
    model_version: str
    created: bool = False


def find_project(server: LabelStudio, chosen: Chosen, *, create: bool) -> Project:
    """Find the project that is meant. Raise WrongUsage where there is none, or more than one."""
    if chosen.project is not None:
        try:
            return _project(server.get(f"/api/projects/{chosen.project}/"))
        except LabelStudioFailed as error:
            if error.status != 404:
                raise
            raise WrongUsage(
                f"Label Studio at {server.url} has no project {chosen.project} for this token"
            ) from error
    found = [one for one in _listed(server, chosen.title) if one.get("title") == chosen.title]
    if len(found) > 1:
        numbers = ", ".join(str(one.get("id")) for one in found)
        raise WrongUsage(
            f"several projects have the title {chosen.title!r}: choose one with --project "
            f"({numbers})"
        )
    if found:
        return _project(server.get(f"/api/projects/{number_in(found[0])}/"))
    if not create:
        raise WrongUsage(
            f"Label Studio at {server.url} has no project with the title {chosen.title!r}: "
            "`dne-train label-studio push` makes one"
        )
    body = {
        "title": chosen.title,
        "description": DESCRIPTION,
        "label_config": LABEL_CONFIG,
        "sampling": "Uncertainty sampling",
        "show_collab_predictions": True,
    }
    return _project(server.post("/api/projects/", body), created=True)


def find_pictures(server: LabelStudio, project: Project) -> int:
    """Find or create the project that holds the files of the pictures. Label Studio takes files
    only into a project whose label config reads one key of the data, and ours reads two."""
    title = f"{project.title}: pictures"[-50:]
    for one in _listed(server, title):
        number = number_in(one)
        if one.get("title") == title and number is not None:
            return number
    body = {
        "title": title,
        "description": f"Files of the pictures of project {project.id}, which shows them. It has "
        "no tasks. Do not delete it.",
        "label_config": PICTURES_CONFIG,
    }
    made = number_in(server.post("/api/projects/", body))
    if made is None:
        raise LabelStudioFailed("Label Studio describes a project without an id")
    return made


def tasks_of(server: LabelStudio, project: Project, *, fields: str) -> Iterator[dict[str, Any]]:
    """Yield all tasks of a project; with `fields` as "all" also their annotations."""
    seen = 0
    for page in range(1, MAX_PAGES + 1):
        found = server.get(
            "/api/tasks/",
            project=project.id,
            page=page,
            page_size=PAGE,
            fields=fields,
            resolve_uri="false",
        )
        tasks = found.get("tasks") if isinstance(found, dict) else None
        if not isinstance(tasks, list):
            raise LabelStudioFailed(f"{server.url} lists tasks in a form that is not understood")
        yield from (one for one in tasks if isinstance(one, dict))
        seen += len(tasks)
        if not tasks or seen >= int(found.get("total") or 0):
            return


def _listed(server: LabelStudio, title: str) -> list[dict[str, Any]]:
    found = server.get("/api/projects/", title=title, page_size=PAGE)
    results = found.get("results") if isinstance(found, dict) else None
    if not isinstance(results, list):
        raise LabelStudioFailed(f"{server.url} lists projects in a form that is not understood")
    return [one for one in results if isinstance(one, dict)]


def _project(found: Any, *, created: bool = False) -> Project:
    number = number_in(found)
    if number is None or not isinstance(found, dict):
        raise LabelStudioFailed("Label Studio describes a project without an id")
    try:
        controls = read_label_config(str(found.get("label_config", "")))
    except LabelConfigInvalid as error:
        raise LabelConfigInvalid(f"project {number} does not fit: {error}") from error
    return Project(
        id=number,
        title=str(found.get("title", "")),
        controls=controls,
        model_version=str(found.get("model_version") or ""),
        created=created,
    )
