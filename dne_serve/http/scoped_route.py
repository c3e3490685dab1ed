"""Routes that say which scope they need. The token is judged before a byte of the body is read.

A route without a scope cannot be served: the server does not start with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount
from starlette.types import Receive, Send
from starlette.types import Scope as Request

from dne_serve.access.audit import audited
from dne_serve.access.auth import TOKEN, Scope
from dne_serve.http.openapi import BEARER, problems
from dne_serve.inference.store_threads import on_store_threads

WITH_TOKEN: dict[str, list[str]] = {BEARER: []}
SECURITY: dict[Scope, list[dict[str, list[str]]]] = {
    Scope.PREDICT: [{}, WITH_TOKEN],
    Scope.READ: [{}, WITH_TOKEN],
    Scope.ADMIN: [WITH_TOKEN],
}


class RouteWithoutScope(Exception):
    """A fault of whoever added the route; no user can do anything about it."""


class ScopedRoute(APIRoute):
    needs: ClassVar[Scope]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if self.needs is not Scope.OPEN:
            extra = {"security": SECURITY[self.needs], **(options.get("openapi_extra") or {})}
            answers = {**problems(401, 403, 429), **(options.get("responses") or {})}
            options |= {"openapi_extra": extra, "responses": answers}
        super().__init__(path, on_store_threads(endpoint, needs=self.needs), **options)

    def _methods_here(self, scope: Request) -> list[str]:
        """Of all routes with this path: another method is another route."""
        routes = every_route(scope["app"].routes)
        here = [one for one in routes if isinstance(one, APIRoute) and one.path == self.path]
        return sorted({method for route in here for method in route.methods or ()})

    async def handle(self, scope: Request, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            # Said to everybody, token or not.
            raise HTTPException(405, headers={"Allow": ", ".join(self._methods_here(scope))})
        if self.needs is Scope.ADMIN:
            async with audited(scope, send, route=self.path) as watched:
                _judge(scope, needs=self.needs)
                await self._answer(scope, receive, watched)
        else:
            _judge(scope, needs=self.needs)
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Request, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, send)


def _judge(scope: Request, *, needs: Scope) -> None:
    authorization = Headers(scope=scope).get("authorization")
    address = scope["client"][0] if scope.get("client") else ""
    door = scope["app"].state.serving.door
    scope[TOKEN] = door.judge(authorization, needs=needs, address=address)


def scoped(scope: Scope) -> type[ScopedRoute]:
    """For `APIRouter(route_class=…)`: every route of that router needs this scope."""
    return type(f"{scope.value.title()}Route", (ScopedRoute,), {"needs": scope})


class OpenFiles(Mount):
    """Files that are the same for everybody: nobody is asked for a token."""


def every_route(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """The routes themselves, also those of included routers."""
    for route in routes:
        included: Any = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from every_route(included.routes)


def scope_of(route: BaseRoute) -> Scope:
    if isinstance(route, OpenFiles):
        return Scope.OPEN
    needs = getattr(route, "needs", None)
    if not isinstance(route, ScopedRoute) or not isinstance(needs, Scope):
        raise RouteWithoutScope(f"{route!r} does not say which scope it needs")
    return needs


def check_scopes(routes: Iterable[BaseRoute]) -> None:
    for route in every_route(routes):
        scope_of(route)
