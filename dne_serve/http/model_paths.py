"""Take the name of a model out of the path, and list the models.

Every route of one model stands below `/models/NAME` too. It is the same route: the middleware takes
the prefix off, and the route finds the model after it has judged the token.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dne_serve.access.permission import Permission
from dne_serve.errors import no_model
from dne_serve.http.openapi import problems
from dne_serve.http.problems import problem_of
from dne_serve.http.scoped_route import Every, by_token, needing, seen_by
from dne_serve.models import MODEL, NAME, ModelState

_BELOW = re.compile(r"/models/([^/]+)(/.*)?", re.DOTALL)
_PROTOCOL = re.compile(r"/v2(?:/repository)?/models/(?!stats(?:/|$))([^/]+)(?:/.*)?", re.DOTALL)
_DEFAULT_LISTED = 100
MAX_LISTED = 1000


class ModelPaths:
    """Middleware that notes the name of the model, and takes `/models/NAME` off the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        named = _BELOW.fullmatch(path)
        rest = named[2] if named else None
        found = named or _PROTOCOL.fullmatch(path)
        if found is not None:
            if not NAME.fullmatch(found[1]):
                await problem_of(no_model(found[1]))(scope, receive, send)
                return
            scope[MODEL] = found[1]
        if named is not None:
            if rest is None:  # the addresses in a page are relative
                await RedirectResponse(f"{named[1]}/", status_code=307)(scope, receive, send)
                return
            scope["path"] = rest
        await self._app(scope, receive, send)


class ModelRow(BaseModel):
    """A model. `version` and `classes` are of the served version, and of the one served last where
    the model is not in memory; null if it was not loaded since the server began. `last_use` is a
    time in RFC 3339. `minutes` counts its requests in each of the last 30 minutes, the oldest
    first; empty if it is not in memory."""

    name: str
    loaded: bool
    version: int | None
    classes: int | None
    last_use: str | None
    minutes: tuple[int, ...]
    error: str | None

    @classmethod
    def of(cls, state: ModelState) -> ModelRow:
        used = state.used_s
        return cls(
            name=state.name,
            loaded=state.loaded,
            version=state.version,
            classes=state.classes,
            last_use=None if used is None else datetime.fromtimestamp(used, UTC).isoformat(),
            minutes=state.minutes,
            error=state.error,
        )


class ModelsAnswer(BaseModel):
    """A page of models in alphabetical order. `default` is the model that routes without a name
    ask. `total` counts the models that match."""

    models: list[ModelRow]
    total: int
    next_after: str | None
    default: str | None


listing = APIRouter(route_class=needing(Permission.READ), tags=["read"])


@listing.get("/models", responses=problems(400, 503))
@by_token
def list_models(
    request: Request,
    models: Every,
    search: Annotated[
        str, Query(max_length=100, description="Only names that contain this text.")
    ] = "",
    after: Annotated[
        str, Query(max_length=100, description="The next_after of the page before.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = _DEFAULT_LISTED,
) -> ModelsAnswer:
    """List the models that the token may see, a page at a time; one where the server has one. Loads
    none."""
    matching = [name for name in seen_by(request.scope, models) if search.lower() in name.lower()]
    rest = [name for name in matching if name > after]
    page = rest[:limit]
    return ModelsAnswer(
        models=[ModelRow.of(state) for state in models.states(page)],
        total=len(matching),
        next_after=page[-1] if len(rest) > limit else None,
        default=models.default if models.default in matching else None,
    )
