"""A small Label Studio in memory, as httpx's transport. Its answers have the shapes of 1.23.2."""

from __future__ import annotations

import email
import email.policy
import json
import re
from collections.abc import Callable
from typing import Any

import httpx

from trainer.loop.label_studio_client import Account, LabelStudio

TOKEN = "0123456789abcdef"
JWT = "head.body.signature"
URL = "http://label-studio:8080"


class FakeLabelStudio:
    """Projects, files and tasks. `fails` may answer, or raise, before anything else does."""

    def __init__(self) -> None:
        self.projects: dict[int, dict[str, Any]] = {}
        self.files: dict[int, tuple[int, str, bytes]] = {}
        self.tasks: dict[int, dict[str, Any]] = {}
        self.access = "access-1"
        self.requests: list[httpx.Request] = []
        self.fails: Callable[[httpx.Request], httpx.Response | None] = lambda request: None
        self.waited: list[float] = []

    def open(self, token: str = TOKEN) -> LabelStudio:
        account = Account(url=URL, token=token)
        return LabelStudio(account, transport=httpx.MockTransport(self), sleep=self.waited.append)

    def annotate(
        self,
        item: str,
        *result: dict[str, Any],
        time: str = "2026-11-17T12:00:00.5Z",
        **others: Any,
    ) -> dict[str, Any]:
        """Have Anna annotate the task of an item."""
        task = next(one for one in self.tasks.values() if one["data"]["dne_item"] == item)
        made = {
            "id": 50 + sum(len(one["annotations"]) for one in self.tasks.values()),
            "result": list(result),
            "created_at": time,
            "updated_at": time,
            "was_cancelled": False,
            "completed_by": 1,
            "created_username": "Anna Doe anna@example.org, 1",
            **others,
        }
        task["annotations"].append(made)
        task["total_annotations"] = 1
        return made

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        failed = self.fails(request)
        if failed is not None:
            return failed
        path = request.url.path
        if path == "/api/token/refresh/":
            given = json.loads(request.content).get("refresh")
            if given != JWT:
                return httpx.Response(401, json={"detail": "Token is invalid"})
            return httpx.Response(200, json={"access": self.access})
        if request.headers.get("authorization") not in (
            f"Token {TOKEN}",
            f"Bearer {self.access}",
        ):
            return httpx.Response(401, json={"detail": "Invalid token."})
        return self._answer(request, path)

    def _answer(self, request: httpx.Request, path: str) -> httpx.Response:
        if path == "/api/projects/":
            return self._create(request) if request.method == "POST" else self._list(request)
        if path == "/api/tasks/":
            return self._list_tasks(request)
        if found := re.fullmatch(r"/api/tasks/(\d+)/", path):
            self.tasks[int(found[1])].update(json.loads(request.content))
            return httpx.Response(200, json=self.tasks[int(found[1])])
        found = re.fullmatch(r"/api/projects/(\d+)/(import|file-uploads)?", path)
        if found is None or int(found[1]) not in self.projects:
            return httpx.Response(404, json={"detail": "Not found."})
        number = int(found[1])
        if found[2] == "import":
            return self._import(request, number)
        if found[2] == "file-uploads":
            wanted = json.loads(request.url.params["ids"])
            listed = [{"id": one, "file": self.files[one][1]} for one in wanted]
            return httpx.Response(200, json=listed[::-1])
        if request.method == "PATCH":
            self.projects[number].update(json.loads(request.content))
        return httpx.Response(200, json=self.projects[number])

    def _create(self, request: httpx.Request) -> httpx.Response:
        number = len(self.projects) + 1
        self.projects[number] = {"id": number, "model_version": "", **json.loads(request.content)}
        return httpx.Response(201, json=self.projects[number])

    def _list(self, request: httpx.Request) -> httpx.Response:
        """The filter `title` finds parts of titles."""
        wanted = request.url.params.get("title", "")
        found = [one for one in self.projects.values() if wanted in one["title"]]
        return httpx.Response(200, json={"count": len(found), "results": found})

    def _import(self, request: httpx.Request, project: int) -> httpx.Response:
        kind = request.headers["content-type"]
        if kind.startswith("multipart/form-data"):
            assert request.url.params["commit_to_project"] == "false"
            if self.projects[project]["label_config"].count('value="$') > 1:
                why = "Your label config has more than one data key"
                return httpx.Response(400, json={"detail": why})
            head = f"Content-Type: {kind}\r\n\r\n".encode()
            form = email.message_from_bytes(head + request.content, policy=email.policy.HTTP)
            numbers = []
            for part in form.iter_parts():
                number = len(self.files) + 1
                name = f"upload/{project}/{number:08x}-{part.get_filename()}"
                self.files[number] = (project, name, part.get_payload(decode=True))  # type: ignore[assignment]
                numbers.append(number)
            return httpx.Response(201, json={"task_count": 0, "file_upload_ids": numbers})
        for one in json.loads(request.content):
            number = len(self.tasks) + 1
            made = {"id": number, "project": project, "annotations": [], "total_annotations": 0}
            self.tasks[number] = {**made, **one}
        return httpx.Response(201, json={"task_count": len(self.tasks), "file_upload_ids": []})

    def _list_tasks(self, request: httpx.Request) -> httpx.Response:
        params = request.url.params
        size, page = int(params["page_size"]), int(params["page"])
        project = int(params["project"])
        mine = [one for one in self.tasks.values() if one["project"] == project]
        shown = [dict(one) for one in mine[(page - 1) * size : page * size]]
        if not shown and page > 1:
            return httpx.Response(404, json={"detail": "Invalid page."})
        if params["fields"] != "all":
            for one in shown:
                del one["annotations"]
        return httpx.Response(200, json={"tasks": shown, "total": len(mine)})
