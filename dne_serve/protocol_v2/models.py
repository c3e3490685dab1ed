"""Define the routes besides inference: health, metadata, statistics, the model repository, and what
this server does not offer.

For tracing, logging settings and shared memory, a question about the state is answered. A change is
refused, and the refusal names the thing to do instead.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request

from dne_serve.access.permission import Permission
from dne_serve.errors import Malformed, NotOffered, NotReady
from dne_serve.http.scoped_route import Every, Parts, actor_of, by_token, seen_by
from dne_serve.protocol_v2 import describe
from dne_serve.protocol_v2.infer import Parsed, parse
from dne_serve.protocol_v2.openapi import (
    INDEX_BODY,
    LOAD_BODY,
    ThisModel,
    Version,
    refusals,
    router,
)
from dne_serve.protocol_v2.schemas import (
    ConfigAnswer,
    IndexRequest,
    IndexRow,
    LiveAnswer,
    LoadConfig,
    LoadRequest,
    LogAnswer,
    ModelAnswer,
    ModelReadyAnswer,
    ServerAnswer,
    ServerReadyAnswer,
    StateAnswer,
    StatisticsAnswer,
    TraceAnswer,
)
from dne_serve.server import DRAINS

health = router(Permission.OPEN)
read = router(Permission.READ)


@health.get("/health/live")
async def live() -> LiveAnswer:
    """Say that the process is alive."""
    return LiveAnswer(live=True)


@health.get("/health/ready", responses=refusals(503))
async def ready(models: Every) -> ServerReadyAnswer:
    """Say whether a version is served; with many models, whether they can be listed."""
    if models.only is not None:
        describe.check_ready(models.only, None)
    if models.shared.drains or models.error is not None:
        raise NotReady(DRAINS if models.shared.drains else models.error or "")
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
@by_token
def all_statistics(request: Request, models: Every) -> StatisticsAnswer:
    """Count the answers of each version since the server started, over all routes; with many
    models, of those in memory."""
    seen = None if models.only is not None else set(seen_by(request.scope, models))
    rows = [
        row
        for serving in models.loaded
        if seen is None or serving.name in seen
        for row in describe.every_statistics(serving)
    ]
    return StatisticsAnswer(model_stats=rows)


@read.get("/models/{model}/stats", dependencies=[ThisModel], responses=refusals(404))
async def model_statistics(serving: Parts) -> StatisticsAnswer:
    """Count the answers of each version since the server started, over all routes."""
    return StatisticsAnswer(model_stats=describe.every_statistics(serving))


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


@read.get(
    "/models/{model}/versions/{version}/stats",
    dependencies=[ThisModel],
    responses=refusals(400, 404, 503),
)
def version_statistics(serving: Parts, version: Version) -> StatisticsAnswer:
    """Count the answers of this version since the server started, over all routes."""
    describe.manifest_of(serving, version)
    return StatisticsAnswer(model_stats=[describe.statistics(serving, version)])


log = logging.getLogger("dne_serve.protocol_v2")

repository = router(Permission.READ)
admin = router(Permission.ADMIN)


@repository.post("/repository/index", openapi_extra=INDEX_BODY, responses=refusals(400, 503))
@by_token
async def repository_index(request: Request, models: Every) -> list[IndexRow]:
    """List the newest versions in the store, and whether each can be asked for; with many models,
    the served version of each. A model that is not in memory is loaded by its first request."""
    asked = await _read(request, IndexRequest)

    def index() -> list[IndexRow]:
        if models.only is not None:
            return describe.index(models.only, only_ready=asked.ready)
        states = models.states(seen_by(request.scope, models)[: describe.MAX_MODELS])
        return describe.index_of(states, only_ready=asked.ready)

    return await models.shared.readers.run(index)


@admin.post(
    "/repository/models/{model}/load",
    dependencies=[ThisModel],
    openapi_extra=LOAD_BODY,
    responses=refusals(400, 404, 503),
)
async def load(request: Request, serving: Parts) -> StateAnswer:
    """Serve the version that the channel names, and load the versions of `config`."""
    versions = _versions(
        await _read(request, LoadRequest), most=serving.settings.fixed.max_resident
    )
    await serving.movers.run(serving.load)
    if serving.loaded.served is None:
        raise describe.why_not_ready(serving)
    for version in versions:
        await serving.predictor.load(version)
    log.info("loaded for %s: the channel's head and %s", actor_of(request), versions or "no more")
    return StateAnswer(name=serving.settings.model_name, state="READY", reason="")


@admin.post(
    "/repository/models/{model}/unload",
    dependencies=[ThisModel],
    openapi_extra=LOAD_BODY,
    responses=refusals(400, 404, 503),
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


async def _read(request: Request, model: type[Parsed]) -> Parsed:
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


unoffered = router(Permission.READ)


@unoffered.get("/trace/setting")
@unoffered.get("/models/{model}/trace/setting", dependencies=[ThisModel], responses=refusals(404))
async def trace_setting() -> TraceAnswer:
    """Say that no trace is written for this protocol."""
    return TraceAnswer(trace_level=["OFF"])


@unoffered.post("/trace/setting", status_code=400, responses=refusals(400))
@unoffered.post(
    "/models/{model}/trace/setting",
    dependencies=[ThisModel],
    status_code=400,
    responses=refusals(400, 404),
)
async def set_trace() -> None:
    """Refuse: only the operator turns traces on."""
    raise Malformed(
        "trace settings cannot be changed by clients: --otlp-endpoint turns traces on at the start"
    )


@unoffered.get("/logging")
async def log_setting(models: Every) -> LogAnswer:
    """Describe the level of the log."""
    return describe.log(models.settings)


@unoffered.post("/logging", status_code=400, responses=refusals(400))
async def set_log() -> None:
    """Refuse: the log is set when the server starts."""
    raise Malformed("the log is set when the server starts, by --log-level")


@unoffered.get("/systemsharedmemory/status")
@unoffered.get("/cudasharedmemory/status")
async def shared_memory() -> list[str]:
    """List no regions: shared memory is not offered."""
    return []


@unoffered.get("/systemsharedmemory/region/{region}/status", responses=refusals(404))
@unoffered.get("/cudasharedmemory/region/{region}/status", responses=refusals(404))
async def shared_memory_region(region: str) -> list[str]:
    """Refuse: there is no region."""
    raise NotOffered(f"no shared memory region {region[:64]!r}: shared memory is not offered")


@unoffered.post(
    "/systemsharedmemory/region/{region}/register", status_code=400, responses=refusals(400)
)
@unoffered.post(
    "/cudasharedmemory/region/{region}/register", status_code=400, responses=refusals(400)
)
async def register_shared_memory(region: str) -> None:
    """Refuse: tensors travel in the request."""
    raise Malformed("shared memory is not offered: send tensors in the request, as binary data")


@unoffered.post("/systemsharedmemory/unregister")
@unoffered.post("/cudasharedmemory/unregister")
async def unregister_shared_memory() -> list[str]:
    """Do nothing: no region is registered."""
    return []


@unoffered.post("/systemsharedmemory/region/{region}/unregister")
@unoffered.post("/cudasharedmemory/region/{region}/unregister")
async def unregister_shared_memory_region(region: str) -> list[str]:
    """Do nothing: no region is registered."""
    return []
