"""The application: routes, pages, problems and what surrounds them, around a `Serving`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from dne_serve import pages, problems, protocol_v2, routes
from dne_serve.edge import BodyLimit, Observed
from dne_serve.engine import Engine
from dne_serve.serving import Serving
from dne_serve.settings import Settings
from model_store import __version__

DESCRIPTION = (
    "An image classifier that grows task by task. A request is answered by one version, and the "
    "answer names it."
)


def create_app(settings: Settings, *, engine: Engine) -> FastAPI:
    """The engine's work starts with the application's lifespan, and ends with it."""
    serving = Serving(settings, engine=engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
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
    problems.install(app)
    app.include_router(routes.api)
    app.include_router(routes.admin)
    app.include_router(protocol_v2.router)
    pages.install(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Observed, metrics=serving.metrics)
    app.add_middleware(protocol_v2.ErrorForm)
    return app
