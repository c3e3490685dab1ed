"""Define the routes of the HTTP interface. Each calls the part of the server that does the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dne_serve.access.permission import Permission, Token
from dne_serve.engines.base import Resident
from dne_serve.errors import Malformed, NotReady
from dne_serve.http import versions
from dne_serve.http.bodies import IMAGES
from dne_serve.http.openapi import IMAGES_SCHEMA, problems
from dne_serve.http.problems import problem
from dne_serve.http.schemas import (
    ClassesAnswer,
    Embedding,
    EmbeddingsAnswer,
    EmbeddingSpace,
    HealthAnswer,
    ModelsReadyAnswer,
    Move,
    MovedAnswer,
    PredictAnswer,
    PromoteMove,
    ReadyAnswer,
    RollbackMove,
    VersionAnswer,
    VersionsAnswer,
)
from dne_serve.http.scoped_route import (
    FACTS,
    TOKEN,
    Every,
    Parts,
    ScopedRoute,
    actor_of,
    json_only,
    needing,
    of_either,
    taking,
)
from dne_serve.http.uploads import FIELD, read_uploads
from dne_serve.inference.answers import MAX_TOP_K, SCORE_WORK, prediction_json, work_of
from dne_serve.inference.nearest import MAX_WHY
from dne_serve.inference.predictor import AT_LEAST_PARAMETER, at_least_of
from dne_serve.inference.store_threads import ARRIVED
from dne_serve.models import SERVING, Models
from dne_serve.observe.live import ActivityAnswer, Listener
from dne_serve.rollout.canary import Chosen
from dne_serve.rollout.channel import ChannelMove
from dne_serve.server import DRAINS, Serving
from model_store.records.channel import ChannelRecord
from model_store.records.sealing import MAX_VERSION

DEFAULT_TOP_K = 5
DEFAULT_LISTED = 100
MAX_LISTED = 1000
JSON = "application/json"
EVENTS = "text/event-stream"
LIVE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""A proxy must neither keep the answer nor wait for the end of a stream."""
LIVE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENTS: {"schema": {"type": "string"}}}},
    **problems(503),
}
BINARY = {"schema": {"type": "string", "format": "binary"}}
PREDICT_BODY = {
    "parameters": [AT_LEAST_PARAMETER],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [FIELD],
                    "additionalProperties": False,
                    "properties": {
                        FIELD: {"type": "array", "minItems": 1, "items": BINARY["schema"]}
                    },
                }
            },
            "application/json": {"schema": IMAGES_SCHEMA},
            "image/*": BINARY,
            "application/octet-stream": BINARY,
        },
    },
}


AnyVersion = Annotated[
    int | None,
    Query(ge=1, le=MAX_VERSION, description="A version in the store; without it the served one."),
]
TopK = Annotated[
    int,
    Query(ge=1, le=MAX_TOP_K, description="How many labels to list; at most all of the version."),
]


Keep = Annotated[
    bool,
    Query(description="Keep the pictures in the inbox, whatever the rules of collecting say."),
]


Threshold = Annotated[
    float | None,
    Query(
        ge=0, le=1, description="Call images unknown from this unknown_score on, not the version's."
    ),
]
Why = Annotated[
    int,
    Query(ge=0, le=MAX_WHY, description="How many of the nearest kept images to name."),
]


class Direct(ScopedRoute):
    """A route that skips FastAPI's reading of parameters for a request without a query: all of them
    have defaults. The reading takes a quarter of the event loop's time for a request."""

    needs = Permission.PREDICT

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            await super()._answer(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send), scope[SERVING])
        await response(scope, receive, send)


predicting = APIRouter(route_class=Direct, tags=["predict"])
reading = APIRouter(route_class=needing(Permission.READ), tags=["read"])
health = APIRouter(route_class=needing(Permission.OPEN), tags=["health"])
admin = APIRouter(
    route_class=needing(Permission.ADMIN),
    dependencies=[Depends(json_only)],
    responses=problems(400, 404, 409, 415, 503),
    tags=["admin"],
)
ROUTERS = (reading, admin, health)


@predicting.post(
    "/predict",
    response_model=PredictAnswer,
    openapi_extra=PREDICT_BODY,
    responses=problems(400, 404, 406, 408, 415, 422, 503),
)
@taking(IMAGES)
async def predict(
    request: Request,
    serving: Parts,
    top_k: TopK = DEFAULT_TOP_K,
    version: AnyVersion = None,
    keep: Keep = False,
    threshold: Threshold = None,
    why: Why = 0,
) -> Response:
    """Classify one or many images: a form's `files`, base64 in JSON, or one as the raw body."""
    collector = serving.collector
    if keep and collector is None:
        raise Malformed("this server keeps no pictures; its operator can allow it with --collect")
    serving.predictor.expect_room()
    chosen = await serving.predictor.resolve(version, at_least=at_least_of(request))
    if threshold is not None and chosen.resident.manifest.doubt is None:
        raise Malformed(
            f"version {chosen.resident.version} tells no probability of unknown, which a threshold "
            "could be for"
        )
    uploads = await read_uploads(request, max_images=serving.settings.max_images)
    watch = collector.watch(uploads, keep=keep) if collector else None
    scored = await serving.predictor.score(
        chosen,
        pictures=uploads,
        since=request.scope.get(ARRIVED),
        on_compared=watch.compared if watch else None,
        wants_tokens=why > 0,
    )
    resident = chosen.resident
    near = await serving.nearest.of(resident, scored, count=why) if why else None
    build = partial(
        prediction_json,
        resident,
        canary=chosen.by == "canary",
        filenames=[upload.filename for upload in uploads],
        scored=scored,
        top_k=top_k,
        identify=watch.answered if watch else None,
        threshold=threshold,
        why=near,
    )
    work = work_of(len(uploads), classes=len(resident.labels), listed=top_k)
    return Response(await serving.answers.build(build, work=work), media_type=JSON)


@reading.get("/embeddings", responses=problems(400, 404, 503))
async def embedding_space(serving: Parts, version: AnyVersion = None) -> EmbeddingSpace:
    """Name the space of embeddings: vectors that a client has kept are of use in theirs."""
    resident = (await serving.predictor.resolve(version)).resident
    return EmbeddingSpace(**_space_of(resident))


@reading.post(
    "/embeddings",
    response_model=EmbeddingsAnswer,
    openapi_extra={"requestBody": PREDICT_BODY["requestBody"]},
    responses=problems(400, 404, 406, 408, 415, 422, 503),
)
@taking(IMAGES)
async def embed(request: Request, serving: Parts, version: AnyVersion = None) -> Response:
    """Compute the embeddings of images, in the forms of `POST /predict`: the part of the token that
    the first expert gives. Nothing is counted as an answer, and no picture is kept."""
    serving.predictor.expect_room()
    chosen = await serving.predictor.resolve(version)
    uploads = await read_uploads(request, max_images=serving.settings.max_images)
    scored = await serving.predictor.score(
        Chosen(resident=chosen.resident, by="asked"),
        pictures=uploads,
        since=request.scope.get(ARRIVED),
        is_traffic=False,
        wants_tokens=True,
    )
    space = _space_of(chosen.resident)

    def build() -> bytes:
        rows = [
            Embedding(filename=upload.filename, embedding=one.token.tolist())
            for upload, one in zip(uploads, scored, strict=True)
            if one.token is not None
        ]
        return EmbeddingsAnswer(**space, embeddings=rows).model_dump_json().encode()

    work = SCORE_WORK * len(uploads) * int(space["width"])
    return Response(await serving.answers.build(build, work=work), media_type=JSON)


def _space_of(resident: Resident) -> dict[str, Any]:
    manifest = resident.manifest
    return {
        "version": manifest.version,
        "expert": manifest.experts[0].sha256,
        "width": manifest.spec.doubt_width,
    }


# A coroutine: the authorizer is used on the event loop only.
async def why_no_moves(serving: Parts) -> str | None:
    closed = serving.authorizer.why_closed(Permission.ADMIN, model=serving.name)
    if closed is None and not serving.keys.can_write:
        return "this server requires signatures and has no key to sign with"
    return closed


@reading.get("/versions", responses=problems(400, 503))
def list_versions(
    request: Request,
    serving: Parts,
    moves_refused: Annotated[str | None, Depends(why_no_moves)],
    before: Annotated[
        int | None,
        Query(ge=1, le=MAX_VERSION, description="Only versions with a smaller number."),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=MAX_LISTED, description="How many versions, the newest of them.")
    ] = DEFAULT_LISTED,
) -> VersionsAnswer:
    """List versions, the served one, and the newest records of the channel."""
    served, record = serving.loaded.served, serving.reloader.record
    overviews: versions.Overviews = request.app.state.overviews
    return overviews.page(
        serving.open_store(),
        channel=serving.settings.channel,
        served=served.version if served else None,
        mode=record.mode if record else None,
        moves_refused=moves_refused,
        before=before,
        limit=limit,
    )


@reading.get("/versions/{version}", responses=problems(400, 404, 503))
def show_version(
    serving: Parts, version: Annotated[int, Path(ge=1, le=MAX_VERSION)]
) -> VersionAnswer:
    """Describe one version: tasks, classes, metrics, shards, preprocessing."""
    return versions.describe(serving.open_store(), version)


@reading.get("/classes", responses=problems(400, 404, 503))
def list_classes(serving: Parts, version: AnyVersion = None) -> ClassesAnswer:
    """List the classes that a version answers, in the order they were learnt, with their tasks."""
    if version is not None:
        return versions.classes(serving.open_store().manifest(version))
    if serving.loaded.served is None:
        raise NotReady("no version is served yet")
    return versions.classes(serving.loaded.served.manifest)


async def _move(request: Request, serving: Serving, move: Callable[[], ChannelMove]) -> Response:
    """Move the channel and load the version on a thread for moves. Wait for the record's moment
    without a thread, so that a rollback finds a free one."""

    def take_up() -> ChannelRecord:
        moved = move()
        record = moved.record
        request.scope[FACTS].update(to=record.target, record=record.number, reason=record.reason)
        serving.follow(moved)
        return record

    record = await serving.movers.run(take_up)
    version = await serving.until_served(record)
    answer = MovedAnswer(version=version, channel=record.channel, record=record)
    return Response(answer.model_dump_json(by_alias=True), media_type=JSON)


@admin.post("/rollback", response_model=MovedAnswer)
async def rollback(request: Request, serving: Parts, move: RollbackMove | None = None) -> Response:
    """Roll the channel back to an earlier version, and hold it there. Answers when this server
    serves the version; a version that it cannot load is not recorded."""
    asked = move or RollbackMove()
    actor = actor_of(request)
    back = partial(serving.mover.rollback, to=asked.to, actor=actor, reason=asked.reason)
    return await _move(request, serving, back)


@admin.post("/promote", response_model=MovedAnswer)
async def promote(request: Request, serving: Parts, move: PromoteMove) -> Response:
    """Promote a version, and follow newer ones from there. Answers when this server serves the
    version; a version that it cannot load is not recorded."""
    actor = actor_of(request)
    onward = partial(serving.mover.promote, move.to, actor=actor, reason=move.reason)
    return await _move(request, serving, onward)


@admin.post("/resume", response_model=MovedAnswer)
async def resume(request: Request, serving: Parts, move: Move | None = None) -> Response:
    """Undo the rollback: return to the version followed last. Answers when this server serves the
    version; a version that it cannot load is not recorded."""
    reason = move.reason if move else ""
    onward = partial(serving.mover.resume, actor=actor_of(request), reason=reason)
    return await _move(request, serving, onward)


@health.get("/healthz")
async def healthz() -> HealthAnswer:
    """Say that the process is alive."""
    return HealthAnswer(status="ok")


@health.get(
    "/readyz",
    response_model=ReadyAnswer | ModelsReadyAnswer,
    responses=problems(401, 403, 404, 503),
)
@of_either
async def readyz(request: Request, models: Every) -> ReadyAnswer | ModelsReadyAnswer | JSONResponse:
    """Say whether a version is served, and the server takes new clients. `error` says why the
    version is not the channel's head. A server with many models is ready when it can list them,
    and its default is served."""
    if models.shared.drains:
        return problem(503, detail=DRAINS, kind="draining", headers={"Retry-After": "1"})
    serving: Serving | None = request.scope.get(SERVING, models.only)
    if serving is None:
        return _ready_models(models)
    served, record = serving.loaded.served, serving.reloader.record
    if served is None:
        detail = serving.error or f"channel {serving.settings.channel} names no version yet"
        return problem(503, detail=detail, kind="not-ready", headers={"Retry-After": "1"})
    settling = serving.reloader.cutover.newest
    return ReadyAnswer(
        version=served.version,
        channel=serving.settings.channel,
        mode=record.mode if record else None,
        record=record.number if record else None,
        head=serving.reloader.head.target if serving.reloader.head else None,
        fallback=serving.reloader.fallback,
        settling=settling.target if settling else None,
        backend=serving.engine.backend,
        engine=serving.engine.choice,
        measuring=serving.measures,
        device=serving.engine.device,
        canary=serving.canary_and_shadow.ready("canary"),
        shadow=serving.canary_and_shadow.ready("shadow"),
        error=serving.error,
    )


def _ready_models(models: Models) -> ModelsReadyAnswer | JSONResponse:
    if models.error is not None:
        return problem(503, detail=models.error, kind="not-ready", headers={"Retry-After": "1"})
    engine = models.shared.engine
    return ModelsReadyAnswer(
        loaded=len(models.loaded),
        default=models.default,
        backend=engine.backend,
        engine=engine.choice,
        measuring=models.shared.measures,
        device=engine.device,
    )


@reading.get("/metrics", response_class=Response)
async def metrics(models: Every) -> Response:
    """Return the metrics in the format of Prometheus."""
    return Response(models.shared.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@reading.get("/live", response_model=ActivityAnswer, responses=LIVE_ANSWERS)
async def look(request: Request, serving: Parts) -> Response:
    """Tell what the server does now. With `Accept: text/event-stream` the answer is a stream of
    server-sent events: the first has all members, and each later one those that have changed."""
    if EVENTS not in request.headers.get("accept", ""):
        answer = serving.activity().model_dump_json()
        return Response(answer, media_type=JSON, headers=LIVE_HEADERS)
    stream = serving.stream
    token: Token | None = request.scope.get(TOKEN)
    client = token.name if token and token.name else actor_of(request)
    listener = Listener(client=client, has_token=token is not None)
    stream.check_room(listener)
    return StreamingResponse(stream.events(listener), media_type=EVENTS, headers=LIVE_HEADERS)
