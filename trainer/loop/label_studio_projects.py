"""Find or create the project of Label Studio, and list its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model_store.errors import LabelConfigInvalid, WrongUsage
from model_store.loop.label_studio_annotations import number_in
from model_store.loop.label_studio_tasks import LABEL_CONFIG, Controls, read_label_config
from trainer.loop.label_studio_client import LabelStudio, LabelStudioFailed

PAGE = 100
MAX_PAGES = 10_000
DESCRIPTION = "Pictures of the inbox of dne-serve. Push and pull with `dne-train label-studio`."
PICTURES_CONFIG = '<View><Image name="image" value="$image"/></View>'


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


def find_project(server: LabelStudio, choice: ProjectChoice, *, create: bool) -> Project:
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
            f"several projects have the title {choice.title!r}: choose one with --project "
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


def find_pictures(server: LabelStudio, project: Project) -> int:
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
