"""Define the routes of health, metadata, configuration and statistics."""

from __future__ import annotations

from dne_serve.access.permission import Permission
from dne_serve.http.scoped_route import Parts
from dne_serve.protocol_v2 import describe
from dne_serve.protocol_v2.openapi import refusals
from dne_serve.protocol_v2.routers import ThisModel, Version, router
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

health = router(Permission.OPEN)
read = router(Permission.READ)


@health.get("/health/live")
async def live() -> LiveAnswer:
    """Say that the process is alive."""
    return LiveAnswer(live=True)


@health.get("/health/ready", responses=refusals(503))
async def ready(serving: Parts) -> ServerReadyAnswer:
    """Say whether a version is served."""
    describe.check_ready(serving, None)
    return ServerReadyAnswer(ready=True)


@health.get("/models/{model}/ready", dependencies=[ThisModel], responses=refusals(404, 503))
async def model_ready(serving: Parts) -> ModelReadyAnswer:
    """Say whether a request that names no version would be answered."""
    describe.check_ready(serving, None)
    return ModelReadyAnswer(name=serving.settings.model_name, ready=True)


@health.get(
    "/models/{model}/versions/{version}/ready",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
async def version_ready(serving: Parts, version: Version) -> ModelReadyAnswer:
    """Say whether this version is in memory. A request loads the version that it names."""
    describe.check_ready(serving, version)
    return ModelReadyAnswer(name=serving.settings.model_name, ready=True)


@read.get("")
async def server_metadata() -> ServerAnswer:
    """Name the server, its version, and the extensions of the protocol that it offers."""
    return describe.server()


# Before the routes with a name in this place: no model is called "stats".
@read.get("/models/stats")
async def all_statistics(serving: Parts) -> StatisticsAnswer:
    """Count the answers of each version since the server started, over all routes."""
    return _statistics(serving)


@read.get("/models/{model}", dependencies=[ThisModel], responses=refusals(404, 503))
def model_metadata(serving: Parts) -> ModelAnswer:
    """Describe inputs and outputs of the served version, and list all versions."""
    return describe.model(serving, describe.manifest_of(serving, None))


@read.get(
    "/models/{model}/versions/{version}",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_metadata(serving: Parts, version: Version) -> ModelAnswer:
    """Describe inputs and outputs of this version."""
    return describe.model(serving, describe.manifest_of(serving, version))


@read.get("/models/{model}/config", dependencies=[ThisModel], responses=refusals(404, 503))
def model_config(serving: Parts) -> ConfigAnswer:
    """Describe the served version as a model configuration, with labels and preprocessing."""
    return describe.config(serving, describe.manifest_of(serving, None))


@read.get(
    "/models/{model}/versions/{version}/config",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_config(serving: Parts, version: Version) -> ConfigAnswer:
    """Describe this version as a model configuration, with labels and preprocessing."""
    return describe.config(serving, describe.manifest_of(serving, version))


@read.get("/models/{model}/stats", dependencies=[ThisModel], responses=refusals(404))
async def model_statistics(serving: Parts) -> StatisticsAnswer:
    """Count the answers of each version since the server started, over all routes."""
    return _statistics(serving)


@read.get(
    "/models/{model}/versions/{version}/stats",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_statistics(serving: Parts, version: Version) -> StatisticsAnswer:
    """Count the answers of this version since the server started, over all routes."""
    describe.manifest_of(serving, version)
    return StatisticsAnswer(model_stats=[describe.statistics(serving, version)])


def _statistics(serving: Serving) -> StatisticsAnswer:
    """Collect the statistics of all versions that were asked, and of the served one."""
    served = serving.residents.served
    versions = {*serving.statistics.versions, *([served.version] if served else [])}
    return StatisticsAnswer(
        model_stats=[describe.statistics(serving, version) for version in sorted(versions)]
    )
