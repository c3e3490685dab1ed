"""Define the routes of Label Studio's ML backend. All of them need the scope `label`."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from dne_serve.access.permission import Permission
from dne_serve.errors import NotReady
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
from dne_serve.loop.label_studio_backend import TaskPredictor, WebhookEvent
from dne_serve.loop.label_studio_schemas import (
    BackendHealthAnswer,
    BackendPredictAnswer,
    BackendPredictBody,
    SetupAnswer,
    SetupBody,
    WebhookAnswer,
    WebhookBody,
)
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.loop.label_studio import Controls, model_version, read_label_config
from model_store.records.inbox import LabelRecord


class BackendRoute(ScopedRoute):
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
    route_class=BackendRoute,
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
    answering = TaskPredictor(serving=serving, chosen=_served(serving), controls=controls)
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

    event = WebhookEvent(
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
