"""Who may ask for what: every route of the protocol is on a router that one of these makes.

anyone   whether the server and its model are ready
predict  inference
read     metadata, configuration, index, statistics, and what is always refused
admin    what changes which versions are in memory
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from dne_serve.access.auth import Scope
from dne_serve.errors import NotOffered
from dne_serve.http.routes import Parts
from dne_serve.http.scoped_route import scoped
from dne_serve.protocol_v2.errors import PREFIX
from dne_serve.protocol_v2.openapi import refusals
from model_store.records.manifest import MAX_VERSION

TAG = "Open Inference Protocol"


def anyone() -> APIRouter:
    return _router(Scope.OPEN)


def predict() -> APIRouter:
    return _router(Scope.PREDICT)


def read() -> APIRouter:
    return _router(Scope.READ)


def admin() -> APIRouter:
    return _router(Scope.ADMIN)


def _router(scope: Scope) -> APIRouter:
    responses = {} if scope is Scope.OPEN else refusals(401, 403, 429)
    return APIRouter(prefix=PREFIX, tags=[TAG], route_class=scoped(scope), responses=responses)


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def this_model(
    serving: Parts, model: Annotated[str, Path(description="The server's `--model-name`.")]
) -> None:
    if model != serving.settings.model_name:
        raise NotOffered(
            f"no model {model[:64]!r}: this server has {serving.settings.model_name!r}"
        )


ThisModel = Depends(this_model)
Version = Annotated[int, Path(ge=1, le=MAX_VERSION, description="A version in the store.")]
