"""Define the route of the live view."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from dne_serve.access.permission import Permission
from dne_serve.http.openapi import problems
from dne_serve.http.scoped_route import Parts, needing
from dne_serve.live.schemas import ActivityAnswer
from dne_serve.live.snapshot import snapshot
from dne_serve.live.stream import Stream
from dne_serve.server import Serving

EVENTS = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""A proxy must neither keep the answer nor wait for the end of a stream."""
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENTS: {"schema": {"type": "string"}}}},
    **problems(503),
}

live = APIRouter(route_class=needing(Permission.READ), tags=["read"])


def new_stream(serving: Serving) -> Stream:
    """Make the stream of a server. It ends when the server leaves its load balancer."""
    return Stream(lambda: snapshot(serving).model_dump(), ends=lambda: serving.drains)


@live.get("/live", response_model=ActivityAnswer, responses=ANSWERS)
async def look(request: Request, serving: Parts) -> Response:
    """Tell what the server does now. With `Accept: text/event-stream` the answer is a stream of
    server-sent events: the first has all members, and each later one those that have changed."""
    if EVENTS not in request.headers.get("accept", ""):
        answer = snapshot(serving).model_dump_json()
        return Response(answer, media_type="application/json", headers=HEADERS)
    stream: Stream = request.app.state.live
    stream.check_room()
    return StreamingResponse(stream.events(), media_type=EVENTS, headers=HEADERS)
