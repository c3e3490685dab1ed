"""Who gets through which route, over the wire."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from dne_serve.access.permission import NewToken, Permission, new_token
from dne_serve.app import create_app
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.http.scoped_route import RouteWithoutPermission, every_route, needing, permission_of
from dne_serve.settings import Settings
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import TOKEN, Live, assert_problem, live_server, png

SCOPES = {
    "/predict": Permission.PREDICT,
    "/versions": Permission.READ,
    "/versions/{version}": Permission.READ,
    "/versions/{version}/report": Permission.READ,
    "/versions/{version}/report.json": Permission.READ,
    "/versions/{version}/report/images/{image}": Permission.READ,
    "/live": Permission.READ,
    "/classes": Permission.READ,
    "/classes/examples": Permission.LABEL,
    "/corrections": Permission.LABEL,
    "/embeddings": Permission.READ,
    "/inbox/{item}/alike": Permission.LABEL,
    "/versions/{version}/kept": Permission.LABEL,
    "/metrics": Permission.READ,
    "/models": Permission.READ,
    "/rollback": Permission.ADMIN,
    "/promote": Permission.ADMIN,
    "/resume": Permission.ADMIN,
    "/inbox": Permission.LABEL,
    "/inbox/groups": Permission.LABEL,
    "/inbox/{item}": Permission.LABEL,
    "/inbox/{item}/image": Permission.LABEL,
    "/inbox/{item}/label": Permission.LABEL,
    "/feedback": Permission.LABEL,
    "/versions/{version}/advice": Permission.LABEL,
    "/jobs/{job}": Permission.LABEL,
    "/jobs/{job}/cancel": Permission.ADMIN,
    "/label-studio/health": Permission.LABEL,
    "/label-studio/setup": Permission.LABEL,
    "/label-studio/predict": Permission.LABEL,
    "/label-studio/webhook": Permission.LABEL,
    "/healthz": Permission.OPEN,
    "/readyz": Permission.OPEN,
    "/": Permission.OPEN,
    "/label": Permission.OPEN,
    "/docs": Permission.OPEN,
    "/openapi.json": Permission.OPEN,
    "/console": Permission.OPEN,
}


@pytest.fixture(scope="module")
def tokens() -> dict[str, NewToken]:
    return {name: new_token(f"{name}={name}") for name in ("predict", "read", "label", "admin")}


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, tokens: dict[str, NewToken]
) -> Iterator[Live]:
    with guarding(tmp_path_factory.mktemp("guarded"), tokens) as live:
        yield live


@contextmanager
def guarding(folder: Path, tokens: dict[str, NewToken]) -> Iterator[Live]:
    """Serves version 2 to whoever has a token."""
    store = Store.create(str(folder / "models"))
    publish_digits(store, publish_letters(store))
    (folder / "tokens").write_text("\n".join(made.line for made in tokens.values()))
    settings: dict[str, Any] = {"token_file": folder / "tokens", "audit_log": folder / "audit"}
    with live_server(Path(store.location), admin_token=None, **settings) as live:
        live.wait_until_ready()
        yield live


def app_of(folder: Path) -> FastAPI:
    return create_app(Settings(store=str(folder)), engine=TorchEngine(device="cpu", threads=1))


def start(app: FastAPI) -> None:
    """What uvicorn does before the first request, and after the last."""

    async def run() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(run())


def test_every_route_says_which_scope_it_needs(tmp_path: Path) -> None:
    """Another protocol may be served below /v2; a test of its own says who may use it."""
    routes = every_route(app_of(tmp_path).routes)
    found = {
        (getattr(route, "path", ""), permission_of(route))
        for route in routes
        if getattr(route, "path", "")[:3] != "/v2"
    }
    jobs = {("/jobs", Permission.LABEL), ("/jobs", Permission.ADMIN)}  # to look, and to ask
    assert found == set(SCOPES.items()) | jobs


async def nothing() -> None:
    """An endpoint."""


def plain_router() -> APIRouter:
    router = APIRouter()
    router.get("/added")(nothing)
    return router


def nested_router() -> APIRouter:
    router = APIRouter(route_class=needing(Permission.READ))
    router.include_router(plain_router(), prefix="/nested")
    return router


@pytest.mark.parametrize("way", ["app", "router", "nested", "route", "mount", "socket", "api"])
def test_a_server_does_not_start_with_a_route_without_a_scope(tmp_path: Path, way: str) -> None:
    app = app_of(tmp_path)
    add = {
        "app": lambda: app.get("/added")(nothing),
        "router": lambda: app.include_router(plain_router()),
        "nested": lambda: app.include_router(nested_router()),
        "route": lambda: app.router.routes.append(Route("/added", nothing)),
        "mount": lambda: app.router.routes.append(Mount("/added", StaticFiles(directory=tmp_path))),
        "socket": lambda: app.router.routes.append(WebSocketRoute("/added", nothing)),
        "api": lambda: app.router.routes.append(APIRoute("/added", nothing)),
    }
    add[way]()
    with pytest.raises(RouteWithoutPermission, match=r"added|[sS]ocket"):
        start(app)


def test_it_starts_with_one_that_has_a_scope(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    router = APIRouter(route_class=needing(Permission.READ))
    router.get("/added")(nothing)
    app.include_router(router, prefix="/more")
    start(app)


def test_no_route_opens_without_its_scope(tmp_path: Path, tokens: dict[str, NewToken]) -> None:
    """Every route of every protocol, with every token but those that open it."""
    asked = 0
    with guarding(tmp_path, tokens) as live:
        before = live.serving.open_store().history("production")
        for route in every_route(app_of(tmp_path).routes):
            needed = permission_of(route)
            if needed is Permission.OPEN or not isinstance(route, APIRoute):
                continue
            path = re.sub(r"{\w+}", "1", route.path)
            for method in route.methods or ():
                answer = live.http.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                for scope in tokens.keys() - {needed.value, "admin"}:
                    header = {"Authorization": f"Bearer {tokens[scope].secret}"}
                    answer = live.http.request(method, path, headers=header)
                    assert answer.status_code == 403, (method, path, scope)
                    asked += 1
        assert live.serving.open_store().history("production") == before
    assert asked > 100


@pytest.mark.parametrize("scope", ["predict", "read", "admin"])
def test_each_token_opens_its_routes_and_no_others(
    guarded: Live, tokens: dict[str, NewToken], scope: str
) -> None:
    header = {"Authorization": f"Bearer {tokens[scope].secret}"}
    answers = {
        "predict": guarded.http.post("/predict", files={"files": png()}, headers=header),
        "read": guarded.http.get("/versions", headers=header),
        # A version that is not there: through the door, and nothing moves.
        "admin": guarded.http.post("/promote", json={"to": 99}, headers=header),
    }
    opened = {"predict", "read", "admin"} if scope == "admin" else {scope}
    for needed, answer in answers.items():
        if needed in opened:
            assert answer.status_code == (404 if needed == "admin" else 200), answer.text
        else:
            assert_problem(answer, 403, says=needed)


def test_without_a_token_only_health_and_pages_answer(guarded: Live) -> None:
    for path in (
        "/healthz",
        "/readyz",
        "/",
        "/label",
        "/docs",
        "/openapi.json",
        "/console/console.js",
    ):
        assert guarded.http.get(path).status_code == 200, path
    for path in ("/versions", "/versions/1", "/classes", "/metrics"):
        assert_problem(guarded.http.get(path), 401)
    answer = guarded.predict(png())
    assert_problem(answer, 401)
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", ["/predict", "/rollback"])
@pytest.mark.parametrize("kind", ["application/json", "image/png"])
def test_the_token_is_judged_before_the_body_is_sent(guarded: Live, path: str, kind: str) -> None:
    """The body is announced and never comes, and the answer does."""
    address = urlsplit(guarded.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
            "Content-Length: 1000\r\n\r\n{".encode()
        )
        assert connection.recv(12) == b"HTTP/1.1 401"


def test_a_method_that_is_not_offered_is_405_with_all_that_are(guarded: Live) -> None:
    answer = guarded.http.delete("/predict")
    assert_problem(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert guarded.http.delete("/v2/logging").headers["allow"] == "GET, POST"


def test_too_many_requests_are_429_with_retry_after(
    tmp_path: Path, tokens: dict[str, NewToken]
) -> None:
    (tmp_path / "tokens").write_text(f"{tokens['read'].line} rate=1")
    token_file = tmp_path / "tokens"
    with live_server(tmp_path / "absent", token_file=token_file) as live:
        header = {"Authorization": f"Bearer {tokens['read'].secret}"}
        answers = [live.http.get("/metrics", headers=header) for _ in range(5)]
        assert answers[0].status_code == 200
        assert_problem(answers[-1], 429, says="1 times a second")
        assert int(answers[-1].headers["retry-after"]) >= 1


def test_wrong_tokens_are_429_after_twenty_of_them(tmp_path: Path) -> None:
    with live_server(tmp_path / "absent") as live:
        answers = [live.admin("/rollback", token="a-wrong-one") for _ in range(25)]
        assert [answer.status_code for answer in answers[:20]] == [403] * 20
        assert_problem(answers[-1], 429, says="wrong tokens")
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert live.http.get("/healthz").status_code == 200


def audit(live: Live) -> list[dict[str, object]]:
    path = live.serving.settings.audit_log
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_admin_requests_are_in_the_audit_log_with_who_and_what(
    guarded: Live, tokens: dict[str, NewToken]
) -> None:
    before = len(audit(guarded))
    admin = {"Authorization": f"Bearer {tokens['admin'].secret}"}
    body = {"to": 1, "reason": 'a\n{"action": "forged"}'}
    moved = guarded.http.post("/rollback", json=body, headers=admin)
    assert moved.status_code == 200, moved.text
    assert moved.json()["record"]["actor"] == "http:admin@127.0.0.1"
    guarded.http.post("/resume", headers=admin)
    guarded.http.post("/promote", json={"to": 77}, headers=admin)
    guarded.http.post("/rollback")
    guarded.http.post("/rollback", headers={"Authorization": f"Bearer {tokens['read'].secret}"})
    rolled_back, resumed, absent, nameless, refused = audit(guarded)[before:]
    assert rolled_back["action"] == "POST /rollback"
    assert (rolled_back["who"], rolled_back["address"]) == ("admin", "127.0.0.1")
    assert (rolled_back["status"], rolled_back["to"]) == (200, 1)
    assert rolled_back["reason"] == body["reason"]
    assert (resumed["status"], absent["status"]) == (200, 404)
    assert (nameless["who"], nameless["status"]) == (None, 401)
    assert (refused["who"], refused["status"]) == (None, 403)


def test_reading_and_predicting_are_not_in_the_audit_log(
    guarded: Live, tokens: dict[str, NewToken]
) -> None:
    before = len(audit(guarded))
    admin = {"Authorization": f"Bearer {tokens['admin'].secret}"}
    guarded.http.get("/versions", headers=admin)
    guarded.http.get("/rollback", headers=admin)
    assert len(audit(guarded)) == before


def test_tokens_are_in_no_answer_and_no_log(
    guarded: Live, tokens: dict[str, NewToken], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    answers: list[httpx.Response] = []
    for made in (*tokens.values(), NewToken(secret="dne_guess", line="")):
        header = {"Authorization": f"Bearer {made.secret}"}
        answers += [guarded.http.get(path, headers=header) for path in ("/versions", "/metrics")]
        answers.append(guarded.http.post("/rollback", json={"to": 99}, headers=header))
    said = caplog.text + "".join(f"{answer.headers}{answer.text}" for answer in answers)
    assert TOKEN not in said
    assert [made for made in tokens.values() if made.secret in said] == []
    assert "dne_guess" not in said
