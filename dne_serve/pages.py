"""The console and the documentation. Everything they need comes from this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, JSONResponse
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from dne_serve.auth import Scope
from dne_serve.doors import OpenFiles, scoped
from dne_serve.openapi import document

CONSOLE = Path(__file__).parent / "console"
NOWHERE = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
CONSOLE_POLICY = f"default-src 'self'; img-src 'self' blob:; {NOWHERE}"
# Swagger UI writes styles into the page and draws its icons from data URLs.
DOCS_POLICY = (
    f"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; {NOWHERE}"
)


def install(app: FastAPI) -> None:
    pages = APIRouter(route_class=scoped(Scope.OPEN))

    @pages.get("/", include_in_schema=False)
    async def console() -> FileResponse:
        return _page("index.html", policy=CONSOLE_POLICY)

    @pages.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return _page("docs.html", policy=DOCS_POLICY)

    @pages.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document(app))

    app.include_router(pages)
    app.router.routes += [
        OpenFiles("/console", StaticFiles(directory=CONSOLE), name="console"),
        OpenFiles("/swagger-ui", StaticFiles(directory=Path(swagger_ui_path)), name="swagger-ui"),
    ]


def _page(name: str, *, policy: str) -> FileResponse:
    return FileResponse(
        CONSOLE / name,
        headers={
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )
