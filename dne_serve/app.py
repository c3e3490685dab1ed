"""Assemble the application: routes, pages, problem documents and middleware, around the models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from dne_serve.engines.base import Engine
from dne_serve.errors import public_message
from dne_serve.http import pages, problems, routes
from dne_serve.http.bodies import Inflated, MemoryBudget
from dne_serve.http.middleware import BodyLimit, KnownHosts, Observed, Packed
from dne_serve.http.model_paths import ModelPaths, listing
from dne_serve.http.scoped_route import check_permissions
from dne_serve.http.versions import Overviews
from dne_serve.loop.job_routes import asking_jobs, reading_jobs
from dne_serve.loop.label_studio import backend
from dne_serve.loop.routes import labelling, teaching
from dne_serve.models import Models
from dne_serve.protocol_v2 import infer
from dne_serve.protocol_v2 import models as protocol
from dne_serve.protocol_v2.openapi import ErrorForm
from dne_serve.rollout.engine_switch import Auto
from dne_serve.rollout.memory import give_back
from dne_serve.settings import Settings
from model_store import __version__
from model_store.report.ancestry import AncestryCache

_WORTH_PACKING = 4096  # bytes of an answer: most clients offer to unpack, and few need it
_SOON_S = 0.2
DESCRIPTION = (
    "An image classifier that grows task by task. A request is answered by one version, and the "
    "answer names it."
)
_PROTOCOL_V2 = (
    protocol.health,
    protocol.read,
    infer.predicting,
    protocol.repository,
    protocol.admin,
    protocol.unoffered,
)


def create_app(settings: Settings, *, engine: Engine, auto: Auto | None = None) -> FastAPI:
    """Make the application. The engine works during the application's lifespan, and with `auto` a
    faster one may take its place."""
    models = Models(settings, engine=engine, auto=auto)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        check_permissions(app.routes)  # also those that were added since
        models.start()
        yield
        await run_in_threadpool(models.stop)

    app = FastAPI(
        title="dne-serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.models = models
    app.state.overviews = Overviews()
    app.state.ancestries = AncestryCache(tell=public_message)
    problems.install(app)
    # First, and without a router in between: the route asked most often is found soonest.
    app.router.routes.extend(routes.predicting.routes)
    inbox = (labelling, teaching, reading_jobs, asking_jobs, backend)
    for router in (*routes.ROUTERS, pages.report_page, pages.reports, *inbox, *_PROTOCOL_V2):
        app.include_router(router)
    pages.install(app, models)
    app.include_router(listing)
    budget = MemoryBudget(
        settings.fixed.max_buffered_bytes,
        max_body_bytes=settings.max_body_bytes,
        on_freed=_give_back_soon,
    )
    app.add_middleware(Inflated)
    app.add_middleware(Packed, minimum_size=_WORTH_PACKING, compresslevel=1)
    app.add_middleware(
        KnownHosts,
        hosts=(settings.host, *settings.hosts),
        origins=settings.origins,
    )
    app.add_middleware(BodyLimit, budget=budget)
    app.add_middleware(
        Observed,
        metrics=models.shared.metrics,
        tracer=models.shared.tracer,
        drains=lambda: models.shared.drains,
        only=models.only,
    )
    app.add_middleware(ErrorForm)
    if models.are_many:
        app.add_middleware(ModelPaths)
    return app


def _give_back_soon() -> None:
    """Return freed memory to the system when the request has ended, which still holds its body."""
    loop = asyncio.get_running_loop()
    loop.call_later(_SOON_S, loop.run_in_executor, None, give_back)
