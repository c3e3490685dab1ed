"""Serve the console and the API documentation. All files come from this server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from dne_serve.access.permission import Permission
from dne_serve.http.openapi import document
from dne_serve.http.scoped_route import OpenFiles, needing

CONSOLE = Path(__file__).parent.parent / "console"
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

    def file_response(self, *found: Any, **options: Any) -> Response:
        answer = super().file_response(*found, **options)
        answer.headers.update(HEADERS)
        return answer


def install(app: FastAPI) -> None:
    pages = APIRouter(route_class=needing(Permission.OPEN))

    @pages.get("/", include_in_schema=False)
    async def console() -> FileResponse:
        return FileResponse(CONSOLE / "index.html", headers=HEADERS)

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
