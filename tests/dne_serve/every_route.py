"""All routes of the application, and how to ask each of them."""

from __future__ import annotations

import re

from dne_serve.app import create_app
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.http.scoped_route import OpenFiles, ScopedRoute, every_route
from dne_serve.settings import Settings
from tests.live_server import TOKEN

HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
PARAMETERS = {"model": "dne", "version": "1"}
QUERIES = {"teach": "?label=x"}
"""By the name of a route: what its query has to hold."""


def scoped_routes() -> list[ScopedRoute]:
    """List the routes, and fail for one that is neither scoped nor a folder of files."""
    app = create_app(Settings(store="absent"), engine=TorchEngine(device="cpu", threads=1))
    routes = [route for route in every_route(app.routes) if not isinstance(route, OpenFiles)]
    scoped = [route for route in routes if isinstance(route, ScopedRoute)]
    assert scoped == routes
    return scoped


def path_of(route: ScopedRoute) -> str:
    """Fill in the parameters of a route's path, and add the query that it needs."""
    path = re.sub(r"\{(\w+)\}", lambda found: PARAMETERS.get(found[1], "x"), route.path)
    return path + QUERIES.get(route.name, "")


def reads_bodies(route: ScopedRoute) -> bool:
    return route.body_field is not None or "requestBody" in (route.openapi_extra or {})
