"""Define the routes of the model repository: list versions, load and unload them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request

from dne_serve.access.permission import Permission
from dne_serve.errors import Malformed
from dne_serve.http.scoped_route import Parts, actor_of
from dne_serve.protocol_v2 import describe
from dne_serve.protocol_v2.body import Model, parse
from dne_serve.protocol_v2.openapi import INDEX_BODY, LOAD_BODY, refusals
from dne_serve.protocol_v2.routers import ThisModel, router
from dne_serve.protocol_v2.schemas import (
    IndexRequest,
    IndexRow,
    LoadConfig,
    LoadRequest,
    StateAnswer,
)

log = logging.getLogger("dne_serve.protocol_v2")

read = router(Permission.READ)
admin = router(Permission.ADMIN)


@read.post("/repository/index", openapi_extra=INDEX_BODY, responses=refusals(400, 413, 503))
async def repository_index(request: Request, serving: Parts) -> list[IndexRow]:
    """List the newest versions in the store, and whether each can be asked for."""
    asked = await _read(request, IndexRequest)
    return await serving.readers.run(lambda: describe.index(serving, only_ready=asked.ready))


@admin.post(
    "/repository/models/{model}/load",
    dependencies=[ThisModel],
    openapi_extra=LOAD_BODY,
    responses=refusals(400, 404, 413, 503),
)
async def load(request: Request, serving: Parts) -> StateAnswer:
    """Serve the version that the channel names, and load the versions of `config`."""
    versions = _versions(await _read(request, LoadRequest), most=serving.settings.max_resident)
    await serving.movers.run(serving.load)
    if serving.residents.served is None:
        raise describe.why_not_ready(serving)
    for version in versions:
        await serving.predictor.load(version)
    log.info("loaded for %s: the channel's head and %s", actor_of(request), versions or "no more")
    return StateAnswer(name=serving.settings.model_name, state="READY", reason="")


@admin.post(
    "/repository/models/{model}/unload",
    dependencies=[ThisModel],
    openapi_extra=LOAD_BODY,
    responses=refusals(400, 404, 413, 503),
)
async def unload(request: Request, serving: Parts) -> StateAnswer:
    """Serve nothing until the model is loaded or the channel is moved through this server."""
    asked = await _read(request, LoadRequest)
    _refuse_other(asked.parameters, than="unload_dependents")
    await serving.movers.run(serving.withdraw)
    log.warning("unloaded for %s", actor_of(request))
    return StateAnswer(
        name=serving.settings.model_name, state="UNAVAILABLE", reason=serving.error or ""
    )


async def _read(request: Request, model: type[Model]) -> Model:
    """Parse a body of any Content-Type, as clients send none. An empty body is an empty object."""
    body = await request.body()
    return parse(body or b"{}", model)


def _versions(asked: LoadRequest, *, most: int) -> list[int]:
    """Read the versions that a `config` names by Triton's version policy."""
    _refuse_other(asked.parameters, than="config")
    config = asked.parameters.get("config")
    if config is None:
        return []
    if not isinstance(config, str):
        raise Malformed("config is a model configuration as JSON in a string")
    try:
        versions = parse(config.encode(), LoadConfig).version_policy.specific.versions
    except Malformed as error:
        raise Malformed(
            f"config: {error}; of a model configuration, only a version_policy that names "
            "specific versions is understood"
        ) from error
    if len(versions) > most:
        raise Malformed(f"at most {most} versions are kept in memory besides the served one")
    return versions


def _refuse_other(parameters: dict[str, Any], *, than: str) -> None:
    other = sorted(parameters.keys() - {than})
    if other:
        raise Malformed(
            f"parameter {other[0][:64]!r} is not known: versions come from the store, and only "
            f"{than!r} is understood here"
        )
