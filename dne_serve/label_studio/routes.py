"""Define the routes of Label Studio's ML backend. All of them need the scope `label`."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

from dne_serve.errors import NotReady
from dne_serve.http.openapi import problems
from dne_serve.http.routes import json_only
from dne_serve.http.scoped_route import Parts, actor_of
from dne_serve.label_studio.answering import Answering
from dne_serve.label_studio.basic import BackendRoute
from dne_serve.label_studio.hearing import Hearing
from dne_serve.label_studio.schemas import (
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
from model_store.label_studio.label_config import read_label_config
from model_store.label_studio.tasks import model_version

backend = APIRouter(
    prefix="/label-studio",
    route_class=BackendRoute,
    dependencies=[Depends(json_only)],
    responses=problems(400, 503),
    tags=["label studio"],
)


@backend.get("/health")
async def backend_health() -> BackendHealthAnswer:
    """Say that the backend is there, and that the token is right."""
    return BackendHealthAnswer(status="UP", model_class="dne-serve")


@backend.post("/setup", responses=problems(413, 415))
async def setup(serving: Parts, body: SetupBody) -> SetupAnswer:
    """Check the label config of a project, and name the served version."""
    read_label_config(body.label_config)
    return SetupAnswer(model_version=model_version(_served(serving).resident.version))


@backend.post(
    "/predict",
    responses=problems(413, 415),
    response_model_exclude_none=True,
    response_model=BackendPredictAnswer,
)
async def predict_tasks(
    serving: Parts, body: BackendPredictBody
) -> dict[str, list[dict[str, object]]]:
    """Predict the classes of tasks. Images are those of the inbox: no address is followed, and a
    task of any other image has an error of its own."""
    controls = read_label_config(body.label_config)
    answering = Answering(serving=serving, chosen=_served(serving), controls=controls)
    return {"results": await answering.answer([task.data for task in body.tasks])}


@backend.post("/webhook", responses=problems(413, 415, 422))
def webhook(request: Request, serving: Parts, body: WebhookBody) -> WebhookAnswer:
    """Take annotations as labels of the inbox: created, updated and deleted ones. Cancelled ones
    are passed over."""
    hearing = Hearing(desk=serving.desk, actor=actor_of(request), body=body)
    return WebhookAnswer(outcomes=hearing.hear())


def _served(serving: Serving) -> Chosen:
    """Choose the served version, and never a canary: it is the one that `setup` names."""
    served = serving.residents.served
    if served is None:
        raise NotReady("no version is served yet")
    return Chosen(resident=served, by="asked")
