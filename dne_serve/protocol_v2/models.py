"""The routes of health, metadata, configuration and statistics."""

from __future__ import annotations

from dne_serve.http.scoped_route import Parts
from dne_serve.protocol_v2 import describe, routers
from dne_serve.protocol_v2.openapi import refusals
from dne_serve.protocol_v2.routers import ThisModel, Version
from dne_serve.protocol_v2.schemas import (
    ConfigAnswer,
    LiveAnswer,
    ModelAnswer,
    ModelReadyAnswer,
    ServerAnswer,
    ServerReadyAnswer,
    StatisticsAnswer,
)
from dne_serve.server import Serving

health = routers.anyone()
read = routers.read()


@health.get("/health/live")
async def live() -> LiveAnswer:
    """The process is alive."""
    return LiveAnswer(live=True)


@health.get("/health/ready", responses=refusals(503))
async def ready(serving: Parts) -> ServerReadyAnswer:
    """A version is served."""
    describe.check_ready(serving, None)
    return ServerReadyAnswer(ready=True)


@health.get("/models/{model}/ready", dependencies=[ThisModel], responses=refusals(404, 503))
async def model_ready(serving: Parts) -> ModelReadyAnswer:
    """A request that names no version would be answered."""
    describe.check_ready(serving, None)
    return ModelReadyAnswer(name=serving.settings.model_name, ready=True)


@health.get(
    "/models/{model}/versions/{version}/ready",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
async def version_ready(serving: Parts, version: Version) -> ModelReadyAnswer:
    """This version is in memory. A request loads the one that it names where it is not."""
    describe.check_ready(serving, version)
    return ModelReadyAnswer(name=serving.settings.model_name, ready=True)


@read.get("")
async def server_metadata() -> ServerAnswer:
    """Name and version of the server, and what it has of the protocol's extensions."""
    return describe.server()


# Before the routes with a name in this place: no model is called "stats".
@read.get("/models/stats")
async def all_statistics(serving: Parts) -> StatisticsAnswer:
    """What each version has answered since the server started, over all routes."""
    return _statistics(serving)


@read.get("/models/{model}", dependencies=[ThisModel], responses=refusals(404, 503))
def model_metadata(serving: Parts) -> ModelAnswer:
    """Inputs and outputs of the served version, and the versions that may be asked for."""
    return describe.model(serving, describe.manifest_of(serving, None))


@read.get(
    "/models/{model}/versions/{version}",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_metadata(serving: Parts, version: Version) -> ModelAnswer:
    """Inputs and outputs of this version."""
    return describe.model(serving, describe.manifest_of(serving, version))


@read.get("/models/{model}/config", dependencies=[ThisModel], responses=refusals(404, 503))
def model_config(serving: Parts) -> ConfigAnswer:
    """The served version as a model configuration, with its labels and preprocessing."""
    return describe.config(serving, describe.manifest_of(serving, None))


@read.get(
    "/models/{model}/versions/{version}/config",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_config(serving: Parts, version: Version) -> ConfigAnswer:
    """This version as a model configuration, with its labels and preprocessing."""
    return describe.config(serving, describe.manifest_of(serving, version))


@read.get("/models/{model}/stats", dependencies=[ThisModel], responses=refusals(404))
async def model_statistics(serving: Parts) -> StatisticsAnswer:
    """What each version has answered since the server started, over all routes."""
    return _statistics(serving)


@read.get(
    "/models/{model}/versions/{version}/stats",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_statistics(serving: Parts, version: Version) -> StatisticsAnswer:
    """What this version has answered since the server started, over all routes."""
    describe.manifest_of(serving, version)
    return StatisticsAnswer(model_stats=[describe.statistics(serving, version)])


def _statistics(serving: Serving) -> StatisticsAnswer:
    """Of the versions that were asked for anything, and of the served one in any case."""
    served = serving.residents.served
    versions = {*serving.statistics.versions, *([served.version] if served else [])}
    return StatisticsAnswer(
        model_stats=[describe.statistics(serving, version) for version in sorted(versions)]
    )
