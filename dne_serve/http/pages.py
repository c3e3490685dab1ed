"""Serve the console, the API documentation and reports. All files come from this server.

A browser cannot send a token when it opens the page of a report. The page has no bytes of the
store: its script asks for the facts with the token of the tab. A browser therefore gets the page
with every status, and the page asks for a token or says what is wrong.
"""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Request
from starlette.datastructures import Headers
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from dne_serve.access.permission import Permission
from dne_serve.errors import NotOffered
from dne_serve.http.openapi import document, problems
from dne_serve.http.problems import problem_of
from dne_serve.http.scoped_route import OpenFiles, Parts, needing
from dne_serve.models import MODEL, Models
from model_store.errors import DneError, ImageRejected, ShardForgotten
from model_store.records.quality import MAX_SHOWN
from model_store.records.sealing import MAX_VERSION
from model_store.report.ancestry import AncestryCache
from model_store.report.facts import make_report, read_picture_of
from model_store.report.record import VersionReport

CONSOLE = pathlib.Path(__file__).parent.parent / "console"
POLICY = (
    "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; object-src 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Files(StaticFiles):
    """Files of the pages, under the same policy as the pages."""

    def file_response(self, *place: Any, **options: Any) -> Response:
        answer = super().file_response(*place, **options)
        answer.headers.update(HEADERS)
        return answer


def install(app: FastAPI, models: Models) -> None:
    pages = APIRouter(route_class=needing(Permission.OPEN))

    @pages.get("/", include_in_schema=False)
    async def console(request: Request) -> FileResponse:
        lists = models.are_many and MODEL not in request.scope
        return FileResponse(CONSOLE / ("models.html" if lists else "index.html"), headers=HEADERS)

    @pages.get("/label", include_in_schema=False)
    async def label() -> FileResponse:
        return FileResponse(CONSOLE / "label.html", headers=HEADERS)

    @pages.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(CONSOLE / "docs.html", headers=HEADERS)

    @pages.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document(app), headers=HEADERS)

    app.include_router(pages)
    app.router.routes.append(OpenFiles("/console", Files(directory=CONSOLE), name="console"))


BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The picture", "content": {"image/jpeg": BINARY, "image/png": BINARY}}
}
PICTURE_HEADERS = {
    "Cache-Control": "no-store",  # a class may be forgotten
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
}
PASSED_ON = ("Retry-After", "WWW-Authenticate")

_ReadRoute = needing(Permission.READ)
VersionPath = Annotated[int, Path(ge=1, le=MAX_VERSION)]


class _PageRoute(_ReadRoute):  # type: ignore[misc, valid-type]
    """Serve the page to a browser even where the request is refused: the page asks for a token."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().handle(scope, receive, send)
        except DneError as error:
            if not _wants_page(scope):
                raise
            await _page_about(error)(scope, receive, send)


report_page = APIRouter(route_class=_PageRoute)
reports = APIRouter(route_class=_ReadRoute, tags=["read"])


def _wants_page(scope: Scope) -> bool:
    return "text/html" in Headers(scope=scope).get("accept", "")


def _page_about(error: DneError | None) -> Response:
    """Make the page, with the status of an error if there is one."""
    headers, status = {**HEADERS, "Vary": "Accept"}, 200
    if error is not None:
        problem = problem_of(error)
        status = problem.status_code
        headers |= {name: problem.headers[name] for name in PASSED_ON if name in problem.headers}
    return FileResponse(CONSOLE / "report.html", status_code=status, headers=headers)


@report_page.get("/versions/{version}/report", include_in_schema=False)
async def show_report(request: Request, serving: Parts, version: VersionPath) -> Response:
    try:
        await serving.readers.run(lambda: serving.open_store().manifest(version))
    except DneError as error:
        if not _wants_page(request.scope):
            raise
        return _page_about(error)
    return _page_about(None)


@reports.get("/versions/{version}/report.json", responses=problems(400, 404, 503))
def tell_report(request: Request, serving: Parts, version: VersionPath) -> VersionReport:
    """Report on one version: accuracy with intervals, the gate, confusions, calibration, the score
    of unknown images, how it was trained, and the growth of its ancestry."""
    store = serving.open_store()
    ancestries: AncestryCache = request.app.state.ancestries
    manifest = store.manifest(version)
    return make_report(store, manifest, ancestry=ancestries.of(store, manifest))


@reports.get(
    "/versions/{version}/report/images/{image}",
    response_class=Response,
    responses={**PICTURE, **problems(400, 404, 503)},
)
def show_image(
    serving: Parts, version: VersionPath, image: Annotated[int, Path(ge=0, lt=MAX_SHOWN)]
) -> Response:
    """Return one picture of a report: a PNG or JPEG of at most 96 pixels a side. The header
    `Dne-Kept` has the digest of the kept image, by which it is corrected."""
    store = serving.open_store()
    manifest = store.manifest(version)
    if image >= len(manifest.metrics.shown):
        raise NotOffered(f"the report of version {version} has no picture {image}")
    try:
        picture, kept = read_picture_of(store, manifest, image)
    except ShardForgotten as error:
        raise NotOffered("the pictures of that class were forgotten") from error
    except ImageRejected as error:
        raise NotOffered("that picture cannot be decoded") from error
    headers = {**PICTURE_HEADERS, "Dne-Kept": kept}
    return Response(picture.data, media_type=picture.type, headers=headers)
