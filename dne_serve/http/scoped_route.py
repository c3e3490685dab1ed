"""Make routes that say which permission they need. A token is judged before the body is read.

A route without a permission cannot be served: the server does not start with one. Requests to
routes that need `admin` are audited.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import Message, Receive, Scope, Send

from dne_serve.access.permission import Permission, Token
from dne_serve.http.openapi import BEARER, problems
from dne_serve.http.problems import answer_to
from dne_serve.server import Serving

TOKEN = "dne.token"
"""Key of an ASGI scope: the token that opened the route."""
FACTS = "dne.audit"
"""Key of an ASGI scope: facts of a change for the audit log (`to`, `reason`, `record`)."""
WITH_TOKEN: dict[str, list[str]] = {BEARER: []}
SECURITY: dict[Permission, list[dict[str, list[str]]]] = {
    Permission.PREDICT: [{}, WITH_TOKEN],
    Permission.READ: [{}, WITH_TOKEN],
    Permission.LABEL: [{}, WITH_TOKEN],
    Permission.ADMIN: [WITH_TOKEN],
}


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


Parts = Annotated[Serving, Depends(serving_of)]


class RouteWithoutPermission(Exception):
    """A fault of the code that added the route; no user can do anything about it."""


class ScopedRoute(APIRoute):
    """A route that needs a permission."""

    needs: ClassVar[Permission]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if self.needs is not Permission.OPEN:
            extra = {"security": SECURITY[self.needs], **(options.get("openapi_extra") or {})}
            answers = {**problems(401, 403, 429), **(options.get("responses") or {})}
            options |= {"openapi_extra": extra, "responses": answers}
        super().__init__(path, on_store_threads(endpoint, needs=self.needs), **options)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            # Said to everybody, token or not.
            raise HTTPException(405, headers={"Allow": ", ".join(self._methods_here(scope))})
        if self.needs is Permission.ADMIN:
            async with audited(scope, send, route=self.path) as watched:
                self._judge(scope)
                await self._answer(scope, receive, watched)
        else:
            self._judge(scope)
            await self._answer(scope, receive, send)

    def _judge(self, scope: Scope) -> None:
        serving: Serving = scope["app"].state.serving
        scope[TOKEN] = serving.door.judge(
            self._authorization(scope), needs=self.needs, address=_address(scope) or ""
        )

    def _authorization(self, scope: Scope) -> str | None:
        """Return the header that the token is read from."""
        return Headers(scope=scope).get("authorization")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, send)

    def _methods_here(self, scope: Scope) -> list[str]:
        """List the methods of all routes with this path: another method is another route."""
        routes = every_route(scope["app"].routes)
        here = [one for one in routes if isinstance(one, APIRoute) and one.path == self.path]
        return sorted({method for route in here for method in route.methods or ()})


class OpenFiles(Mount):
    """Files that are the same for everybody, without a token."""


def needing(permission: Permission) -> type[ScopedRoute]:
    """Make the `route_class` of an APIRouter whose routes all need this permission."""
    return type(f"{permission.value.title()}Route", (ScopedRoute,), {"needs": permission})


def on_store_threads(endpoint: Callable[..., Any], *, needs: Permission) -> Callable[..., Any]:
    """Make a plain function that takes `serving` a coroutine on the server's store threads: the
    framework would run it on the threads that all share. Moves do not wait behind reads. The JSON
    is written on the same thread."""
    parameters = inspect.signature(endpoint).parameters
    if inspect.iscoroutinefunction(endpoint) or "serving" not in parameters:
        return endpoint

    @functools.wraps(endpoint)
    async def run(**given: Any) -> Any:
        serving: Serving = given["serving"]
        threads = serving.movers if needs is Permission.ADMIN else serving.readers
        return await threads.run(lambda: _written(endpoint(**given)))

    return run


def _written(answer: object) -> object:
    if not isinstance(answer, BaseModel):
        return answer
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


def _address(scope: Scope) -> str | None:
    return scope["client"][0] if scope.get("client") else None


def actor_of(request: Request) -> str:
    """Name the client for a channel record: `http:NAME@ADDRESS`, or `http:ADDRESS`."""
    address = _address(request.scope) or "unknown"
    token: Token | None = request.scope.get(TOKEN)
    return f"http:{token.name}@{address}" if token and token.name else f"http:{address}"


@asynccontextmanager
async def audited(scope: Scope, send: Send, *, route: str) -> AsyncIterator[Send]:
    """Yield a `send` that notes the status, and write the request to the audit log at the end. The
    log names the template of the route, because a path may have any length."""
    status: int | None = None

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    facts: dict[str, Any] = scope.setdefault(FACTS, {})
    try:
        yield watched
    except Exception as error:
        status = status or answer_to(error).status
        raise
    finally:
        serving: Serving = scope["app"].state.serving
        token: Token | None = scope.get(TOKEN)
        note = serving.audit.note if token else serving.audit.note_refused
        note(
            f"{scope['method']} {route}",
            who=token.name if token else None,
            address=_address(scope),
            status=status,
            **facts,
        )


def every_route(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Yield the routes themselves, also those of included routers."""
    for route in routes:
        included: Any = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from every_route(included.routes)


def permission_of(route: BaseRoute) -> Permission:
    if isinstance(route, OpenFiles):
        return Permission.OPEN
    needs = getattr(route, "needs", None)
    if not isinstance(route, ScopedRoute) or not isinstance(needs, Permission):
        raise RouteWithoutPermission(f"{route!r} does not say which permission it needs")
    return needs


def check_permissions(routes: Iterable[BaseRoute]) -> None:
    for route in every_route(routes):
        permission_of(route)
