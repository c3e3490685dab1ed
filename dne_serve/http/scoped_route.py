"""Make routes that say which permission they need, and which kind of body they take.

A token is judged before the body is read. A body is small unless the route says otherwise, and
JSON is parsed within its limits, on a thread where it is long. A route without a permission cannot
be served: the server does not start with one. Requests that change something are audited.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Set
from contextlib import asynccontextmanager
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import Message, Receive, Scope, Send

from dne_serve.access.permission import ANY_MODEL, Permission, Token, is_direct
from dne_serve.errors import NotOffered, TypeNotAccepted
from dne_serve.http.bodies import (
    AT_ONCE_BYTES,
    RESERVATION,
    SMALL_BODY,
    BodyKind,
    Reservation,
    check_json,
)
from dne_serve.http.openapi import BEARER, problems
from dne_serve.http.problems import answer_to
from dne_serve.inference.store_threads import CLIENT_GONE, IS_GONE
from dne_serve.models import MODEL, SERVING, Models
from dne_serve.observe.events import CURRENT
from dne_serve.server import Serving
from dne_serve.shared import Shared

TOKEN = "dne.token"
"""Key of an ASGI scope: the token that opened the route."""
FACTS = "dne.audit"
"""Key of an ASGI scope: facts of a change for the audit log (`to`, `reason`, `record`)."""
READING = frozenset({"GET", "HEAD"})
TAKES, ONLY_READS = "dne_takes", "dne_only_reads"
OF_EITHER, BY_TOKEN = "dne_of_either", "dne_by_token"
"""Attributes of an endpoint that the decorators below set."""
WITH_TOKEN: dict[str, list[str]] = {BEARER: []}
SECURITY: dict[Permission, list[dict[str, list[str]]]] = {
    Permission.PREDICT: [{}, WITH_TOKEN],
    Permission.READ: [{}, WITH_TOKEN],
    Permission.LABEL: [{}, WITH_TOKEN],
    Permission.ADMIN: [WITH_TOKEN],
}


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def _serving_of(request: Request) -> Serving:
    serving: Serving = request.scope[SERVING]
    return serving


async def _models_of(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Parts = Annotated[Serving, Depends(_serving_of)]
"""The model that a request is for. A route with a parameter `serving` is one of a model."""
Every = Annotated[Models, Depends(_models_of)]
"""All models. A route with `models` and without `serving` is one of the server."""


def seen_by(scope: Scope, models: Models) -> list[str]:
    """List the names of models that the token of a request may know. Blocks."""
    token: Token | None = scope.get(TOKEN)
    names = models.names()
    if token is None or not models.are_many:
        return names
    return [name for name in names if token.sees(name)]


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def taking(kind: BodyKind) -> Callable[[Endpoint], Endpoint]:
    """Make the decorator of an endpoint that takes another kind of body than a small one."""
    return functools.partial(_with, name=TAKES, value=kind)


def only_reading(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint of the scope `label` that takes a body, and changes nothing by it."""
    return _with(endpoint, name=ONLY_READS, value=True)


def of_either(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that answers for the server, and below `/models/NAME` for that model."""
    return _with(endpoint, name=OF_EITHER, value=True)


def by_token(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint of the server that tells each token of the models that it may see."""
    return _with(endpoint, name=BY_TOKEN, value=True)


def _with(endpoint: Endpoint, *, name: str, value: object) -> Endpoint:
    setattr(endpoint, name, value)
    return endpoint


class RouteWithoutPermission(Exception):
    """A fault of the code that added the route; no user can do anything about it."""


class ScopedRoute(APIRoute):
    """A route that needs a permission, and takes bodies of one kind."""

    needs: ClassVar[Permission]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.takes: BodyKind = getattr(endpoint, TAKES, SMALL_BODY)
        methods = frozenset(options.get("methods") or {"GET"})
        self.changes = _changes(endpoint, needs=self.needs, methods=methods)
        parameters = inspect.signature(endpoint).parameters
        self.of_model = "serving" in parameters or "{model}" in path
        self.of_either, self.by_token = hasattr(endpoint, OF_EITHER), hasattr(endpoint, BY_TOKEN)
        self.of_server = "models" in parameters and not self.of_model and not self.of_either
        if self.needs is not Permission.OPEN:
            extra = {"security": SECURITY[self.needs], **(options.get("openapi_extra") or {})}
            answers = {**problems(401, 403, 429), **(options.get("responses") or {})}
            if "POST" in methods:
                answers[413] = self.takes.described(like=answers.get(413, answers[401]))
            options |= {"openapi_extra": extra, "responses": answers}
        run = _on_store_threads(endpoint, needs=self.needs, changes=self.changes)
        super().__init__(path, run, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Make the handler of a request. FastAPI itself would parse JSON of any size and shape on
        the event loop."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        adapter: TypeAdapter[Any] = TypeAdapter(self.body_field.field_info.annotation or Any)

        async def read_and_handle(request: Request) -> Response:
            await json_only(request)
            if body := await request.body():
                parsed = await _parse(body, adapter, kind=self.takes)
                request = _Parsed(request, body=body, parsed=parsed)
            return await handle(request)

        return read_and_handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            # Tell everybody, with or without a token.
            raise HTTPException(405, headers={"Allow": ", ".join(self._methods_here(scope))})
        if self.changes:
            async with audited(scope, send, route=self.path) as watched:
                await self._admit(scope, receive, watched)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Judge the token and the announced length before any byte of the body is read, and find
        the model after that."""
        models: Models = scope["app"].state.models
        name = self._model_in(scope, models)
        self._judge(scope, models, name)
        CLIENT_GONE.set(scope.get(IS_GONE, _never))
        reservation: Reservation = scope[RESERVATION]
        reservation.limit(self.takes.most_bytes(models.settings.max_body_bytes))
        if self.of_model or name is not None:
            scope[SERVING] = await models.get(name)
            trace = CURRENT.get()
            if trace is not None:
                trace.model = name
        await self._answer(scope, receive, send)

    def _model_in(self, scope: Scope, models: Models) -> str | None:
        """Return the name of the model that the route answers for."""
        if self.of_model:
            return models.name_in(scope)
        if self.of_server and MODEL in scope:
            raise NotOffered(f"{self.path} is about the whole server: ask it without /models/NAME")
        return scope.get(MODEL) if self.of_either else None

    def _judge(self, scope: Scope, models: Models, name: str | None) -> None:
        # What is open about a server would tell everybody which models there are.
        opens = self.needs is Permission.OPEN and name is not None
        needs = Permission.READ if opens else self.needs
        lists = models.are_many and self.by_token
        scope[TOKEN] = models.shared.authorizer.judge(
            self._authorization(scope),
            needs=needs,
            address=_address(scope) or "",
            is_direct=needs not in (Permission.LABEL, Permission.ADMIN) or is_direct(scope),
            model=ANY_MODEL if lists else name,
        )

    def _authorization(self, scope: Scope) -> str | None:
        """Return the header that the token is read from."""
        return Headers(scope=scope).get("authorization")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, send)

    def _methods_here(self, scope: Scope) -> list[str]:
        """List the methods of all routes with this path: another method is another route."""
        every = (route for route in every_route(scope["app"].routes) if isinstance(route, APIRoute))
        here = [route for route in every if route.path == self.path]
        return sorted({method for route in here for method in route.methods or ()})


class OpenFiles(Mount):
    """Files that are the same for everybody, without a token."""


def needing(permission: Permission) -> type[ScopedRoute]:
    """Make the `route_class` of an APIRouter whose routes all need this permission."""
    return type(f"{permission.value.title()}Route", (ScopedRoute,), {"needs": permission})


# A coroutine although it waits for nothing: a plain function would cost a trip to the thread pool.
async def json_only(request: Request) -> None:
    """Refuse a body of another type before it is read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    reservation: Reservation = request.scope[RESERVATION]
    has_body = reservation.declared or "transfer-encoding" in request.headers
    if has_body and kind != "application/json":
        raise TypeNotAccepted(f"Content-Type {kind[:100]!r} is not accepted: send application/json")


class _Parsed(Request):
    """A request whose JSON is validated already. FastAPI takes the object as it is."""

    def __init__(self, request: Request, *, body: bytes, parsed: object) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes, self._parsed = body, parsed

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        return self._parsed


async def _parse(body: bytes, adapter: TypeAdapter[Any], *, kind: BodyKind) -> object:
    def parse() -> object:
        check_json(body, max_values=kind.max_json_values)
        try:
            return adapter.validate_json(body)
        except ValidationError as error:
            invalid = error.errors(include_url=False, include_input=False, include_context=False)
            said = [{**fault, "loc": ("body", *fault["loc"])} for fault in invalid]
            raise RequestValidationError(said) from None

    return parse() if len(body) <= AT_ONCE_BYTES else await run_in_threadpool(parse)


def _changes(endpoint: Callable[..., Any], *, needs: Permission, methods: Set[str]) -> bool:
    """Return whether requests change something: labels, or what is served."""
    if needs is Permission.LABEL:
        return not (methods <= READING or hasattr(endpoint, ONLY_READS))
    return needs is Permission.ADMIN


def _on_store_threads(
    endpoint: Callable[..., Any], *, needs: Permission, changes: bool
) -> Callable[..., Any]:
    """Make a plain function that takes `serving` or `models` a coroutine on the store threads of
    the server: the framework would run it on the threads that all share. Moves, labels and reads do
    not wait behind each other. The JSON is written on the same thread."""
    parameters = inspect.signature(endpoint).parameters
    if inspect.iscoroutinefunction(endpoint) or not {"serving", "models"} & parameters.keys():
        return endpoint

    @functools.wraps(endpoint)
    async def run(**given: Any) -> Any:
        shared: Shared = given["serving"].shared if "serving" in given else given["models"].shared
        threads = shared.readers
        if changes:
            threads = shared.movers if needs is Permission.ADMIN else shared.labellers
        return await threads.run(lambda: _written(endpoint(**given)))

    return run


def _written(answer: object) -> object:
    if not isinstance(answer, BaseModel):
        return answer
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


def _never() -> bool:
    return False


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
    except ClientDisconnect:
        raise  # without a status: the client was told nothing
    except Exception as error:
        status = status or answer_to(error).status
        raise
    finally:
        models: Models = scope["app"].state.models
        audit, serving = models.shared.audit, scope.get(SERVING)
        if serving is not None and serving.name is not None:
            facts = {"model": serving.name, **facts}
        token: Token | None = scope.get(TOKEN)
        # Where no token is needed, anybody can send any number of requests that come to nothing.
        is_done = TOKEN in scope and status is not None and status < 400
        note = audit.note if token or is_done else audit.note_refused
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
