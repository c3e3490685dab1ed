"""Answer requests for tracing, logging settings and shared memory, which are not offered.

A question for the state is answered. A change is refused, with the thing to do instead.
"""

from __future__ import annotations

from dne_serve.access.permission import Permission
from dne_serve.errors import Malformed, NotOffered
from dne_serve.http.scoped_route import Parts
from dne_serve.protocol_v2 import describe
from dne_serve.protocol_v2.openapi import refusals
from dne_serve.protocol_v2.routers import ThisModel, router
from dne_serve.protocol_v2.schemas import LogAnswer, TraceAnswer

read = router(Permission.READ)


@read.get("/trace/setting")
async def trace_setting() -> TraceAnswer:
    """Say that tracing is off."""
    return TraceAnswer(trace_level=["OFF"])


@read.get("/models/{model}/trace/setting", dependencies=[ThisModel], responses=refusals(404))
async def model_trace_setting() -> TraceAnswer:
    """Say that tracing is off."""
    return TraceAnswer(trace_level=["OFF"])


@read.post("/trace/setting", status_code=400, responses=refusals(400))
async def set_trace() -> None:
    """Refuse: there is no tracing."""
    raise Malformed("tracing is not offered: /metrics and the statistics say where time goes")


@read.post(
    "/models/{model}/trace/setting",
    dependencies=[ThisModel],
    status_code=400,
    responses=refusals(400, 404),
)
async def set_model_trace() -> None:
    """Refuse: there is no tracing."""
    await set_trace()


@read.get("/logging")
async def log_setting(serving: Parts) -> LogAnswer:
    """Describe the level of the log."""
    return describe.log(serving)


@read.post("/logging", status_code=400, responses=refusals(400))
async def set_log() -> None:
    """Refuse: the log is set when the server starts."""
    raise Malformed("the log is set when the server starts, by --log-level")


@read.get("/systemsharedmemory/status")
@read.get("/cudasharedmemory/status")
async def shared_memory() -> list[str]:
    """List no regions: shared memory is not offered."""
    return []


@read.get("/systemsharedmemory/region/{region}/status", responses=refusals(404))
@read.get("/cudasharedmemory/region/{region}/status", responses=refusals(404))
async def shared_memory_region(region: str) -> list[str]:
    """Refuse: there is no region."""
    raise NotOffered(f"no shared memory region {region[:64]!r}: shared memory is not offered")


@read.post("/systemsharedmemory/region/{region}/register", status_code=400, responses=refusals(400))
@read.post("/cudasharedmemory/region/{region}/register", status_code=400, responses=refusals(400))
async def register_shared_memory(region: str) -> None:
    """Refuse: tensors travel in the request."""
    raise Malformed("shared memory is not offered: send tensors in the request, as binary data")


@read.post("/systemsharedmemory/unregister")
@read.post("/cudasharedmemory/unregister")
async def unregister_shared_memory() -> list[str]:
    """Do nothing: no region is registered."""
    return []


@read.post("/systemsharedmemory/region/{region}/unregister")
@read.post("/cudasharedmemory/region/{region}/unregister")
async def unregister_shared_memory_region(region: str) -> list[str]:
    """Do nothing: no region is registered."""
    return []
