"""Assemble the application: routes, pages, problem documents and middleware, around a `Serving`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from dne_serve.engines.base import Engine
from dne_serve.http import pages, problems, routes
from dne_serve.http.body_room import Room
from dne_serve.http.hosts import KnownHosts
from dne_serve.http.inflate import Inflated
from dne_serve.http.middleware import BodyLimit, Observed, Packed
from dne_serve.http.scoped_route import check_permissions
from dne_serve.http.versions import Overviews
from dne_serve.label_studio.routes import backend
from dne_serve.labelling import job_routes
from dne_serve.labelling.routes import labelling
from dne_serve.labelling.waiting import WaitingLabels
from dne_serve.live.routes import live, new_stream
from dne_serve.protocol_v2 import infer, models, repository, unoffered
from dne_serve.protocol_v2.routers import ErrorForm
from dne_serve.reports import routes as reports
from dne_serve.reports.lineage import Lineages
from dne_serve.server import Serving
from dne_serve.settings import Settings, listed
from model_store import __version__

WORTH_PACKING = 4096  # bytes of an answer: most clients offer to unpack, and few need it
DESCRIPTION = (
    "An image classifier that grows task by task. A request is answered by one version, and the "
    "answer names it."
)
PROTOCOL_V2 = (
    models.health,
    models.read,
    infer.predicting,
    repository.read,
    repository.admin,
    unoffered.read,
)


def create_app(settings: Settings, *, engine: Engine) -> FastAPI:
    """Make the application. The engine works during the application's lifespan."""
    serving = Serving(settings, engine=engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        check_permissions(app.routes)  # also those that were added since
        serving.start()
        yield
        await run_in_threadpool(serving.stop)

    app = FastAPI(
        title="dne-serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.serving = serving
    app.state.overviews = Overviews()
    app.state.waiting = WaitingLabels()
    app.state.lineages = Lineages()
    app.state.live = new_stream(serving)
    problems.install(app)
    # First, and without a router in between: the route asked most often is found soonest.
    app.router.routes.extend(routes.predicting.routes)
    inbox = (labelling, job_routes.reading, job_routes.asking, backend)
    for router in (*routes.ROUTERS, live, reports.page, reports.reading, *inbox, *PROTOCOL_V2):
        app.include_router(router)
    pages.install(app)
    room = Room(settings.fixed.max_buffered_bytes, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Inflated, max_bytes=settings.max_body_bytes)
    app.add_middleware(Packed, minimum_size=WORTH_PACKING, compresslevel=1)
    app.add_middleware(
        KnownHosts,
        hosts=(settings.host, *listed(settings.allowed_hosts)),
        origins=listed(settings.allowed_origins),
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, room=room)
    app.add_middleware(
        Observed,
        metrics=serving.metrics,
        tracer=serving.tracer,
        drains=lambda: serving.drains,
    )
    app.add_middleware(ErrorForm)
    return app
