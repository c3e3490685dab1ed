"""What clients may ask of other servers: tracing, a log set from afar, shared memory.

Asking how things stand is answered; asking for a change is refused with what to do instead.
"""

from __future__ import annotations

from dne_serve.errors import Malformed, NotOffered
from dne_serve.http.scoped_route import Parts
from dne_serve.protocol_v2 import describe, routers
from dne_serve.protocol_v2.openapi import refusals
from dne_serve.protocol_v2.routers import ThisModel
from dne_serve.protocol_v2.schemas import LogAnswer, TraceAnswer

read = routers.read()


@read.get("/trace/setting")
async def trace_setting() -> TraceAnswer:
    """Always off."""
    return TraceAnswer(trace_level=["OFF"])


@read.get("/models/{model}/trace/setting", dependencies=[ThisModel], responses=refusals(404))
async def model_trace_setting() -> TraceAnswer:
    """Always off."""
    return TraceAnswer(trace_level=["OFF"])


@read.post("/trace/setting", status_code=400, responses=refusals(400))
async def set_trace() -> None:
    """Refused: there is no tracing."""
    raise Malformed("tracing is not offered: /metrics and the statistics say where time goes")


@read.post(
    "/models/{model}/trace/setting",
    dependencies=[ThisModel],
    status_code=400,
    responses=refusals(400, 404),
)
async def set_model_trace() -> None:
    """Refused: there is no tracing."""
    await set_trace()


@read.get("/logging")
async def log_setting(serving: Parts) -> LogAnswer:
    """What the log says."""
    return describe.log(serving)


@read.post("/logging", status_code=400, responses=refusals(400))
async def set_log() -> None:
    """Refused: the log is set when the server starts."""
    raise Malformed("the log is set when the server starts, by --log-level")


@read.get("/systemsharedmemory/status")
@read.get("/cudasharedmemory/status")
async def shared_memory() -> list[str]:
    """No regions: shared memory is not offered."""
    return []


@read.get("/systemsharedmemory/region/{region}/status", responses=refusals(404))
@read.get("/cudasharedmemory/region/{region}/status", responses=refusals(404))
async def shared_memory_region(region: str) -> list[str]:
    """There is no region."""
    raise NotOffered(f"no shared memory region {region[:64]!r}: shared memory is not offered")


@read.post("/systemsharedmemory/region/{region}/register", status_code=400, responses=refusals(400))
@read.post("/cudasharedmemory/region/{region}/register", status_code=400, responses=refusals(400))
async def register_shared_memory(region: str) -> None:
    """Refused: tensors travel in the request."""
    raise Malformed("shared memory is not offered: send tensors in the request, as binary data")


@read.post("/systemsharedmemory/unregister")
@read.post("/cudasharedmemory/unregister")
async def unregister_shared_memory() -> list[str]:
    """Nothing is registered, before and after."""
    return []


@read.post("/systemsharedmemory/region/{region}/unregister")
@read.post("/cudasharedmemory/region/{region}/unregister")
async def unregister_shared_memory_region(region: str) -> list[str]:
    """Nothing is registered, before and after."""
    return []
