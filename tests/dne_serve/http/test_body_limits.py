"""Every route has a limit on its bodies, and parses them within it. `make test SUITE=abuse`
has the long form, with the worst bodies that each limit allows."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel, field_validator

from dne_serve.access.permission import Permission
from dne_serve.app import create_app
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.http.bodies import AT_ONCE_BYTES, IMAGES, SMALL_BODY, BodyKind
from dne_serve.http.openapi import document
from dne_serve.http.scoped_route import ScopedRoute, needing, taking
from dne_serve.loop.label_studio import CONFIG, EVENT, TASKS
from dne_serve.settings import Settings
from tests.dne_serve.every_route import HEADERS, path_of, reads_bodies, scoped_routes
from tests.dne_serve.wire.test_limits import connect
from tests.live_server import Live, assert_problem

MOST = Settings(store="x").max_body_bytes
OTHER_KINDS = {
    "/predict": IMAGES,
    "POST /inbox": IMAGES,
    "POST /embeddings": IMAGES,
    "/v2/models/{model}/infer": IMAGES,
    "/v2/models/{model}/versions/{version}/infer": IMAGES,
    "/label-studio/setup": CONFIG,
    "/label-studio/predict": TASKS,
    "/label-studio/webhook": EVENT,
}
ROUTES = {
    f"{method} {route.path}": route for route in scoped_routes() for method in route.methods or ()
}
READING = [name for name, route in ROUTES.items() if reads_bodies(route)]


def most_of(route: ScopedRoute) -> int:
    return route.takes.most_bytes(MOST)


def test_a_body_has_64_kib_unless_its_route_says_otherwise() -> None:
    assert len(ROUTES) > 50
    assert SMALL_BODY.max_bytes == 64 << 10
    for name, route in ROUTES.items():
        kind = OTHER_KINDS.get(name, OTHER_KINDS.get(route.path, SMALL_BODY))
        assert route.takes == kind, name
    for kind in (CONFIG, TASKS, EVENT):
        assert kind.most_bytes(MOST) < MOST
        assert kind.most_bytes(1000) == 1000  # the setting holds for all
    assert {"POST /feedback", "POST /rollback", "POST /predict"} < set(READING)


@pytest.mark.parametrize("name", ROUTES)
def test_a_longer_body_is_refused_before_it_is_sent(steady: Live, name: str) -> None:
    route, method = ROUTES[name], name.split()[0]
    head = f"{method} {path_of(route)} HTTP/1.1\r\nHost: localhost\r\n"
    headers = "".join(f"{key}: {value}\r\n" for key, value in HEADERS.items())
    length = f"Content-Length: {most_of(route) + 1}\r\n\r\n"
    with connect(steady, head + headers + length) as connection:
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b"connection: close" in answer


def pieces(total: int) -> Iterator[bytes]:
    for at in range(0, total, 1 << 16):
        yield bytes(min(1 << 16, total - at))


@pytest.mark.parametrize("name", READING)
def test_a_longer_body_is_refused_as_it_streams_and_as_it_inflates(steady: Live, name: str) -> None:
    route = ROUTES[name]
    path, most = path_of(route), most_of(route)
    assert steady.http.post(path, content=pieces(most + 1), headers=HEADERS).status_code == 413
    packed = {**HEADERS, "Content-Encoding": "gzip"}
    bomb = gzip.compress(bytes(most + 1), 1)
    assert len(bomb) < most / 50
    assert steady.http.post(path, content=bomb, headers=packed).status_code == 413
    whole = gzip.compress(b" " * most, 1)
    assert steady.http.post(path, content=whole, headers=packed).status_code != 413


def test_the_documentation_tells_the_limit_of_every_route_that_takes_a_body(steady: Live) -> None:
    paths = steady.http.get("/openapi.json").json()["paths"]
    told = {path: one["post"]["responses"]["413"] for path, one in paths.items() if "post" in one}
    assert {name.removeprefix("POST ") for name in OTHER_KINDS} | {
        "/feedback",
        "/jobs",
        "/v2/logging",
    } <= set(told)
    for path, refusal in told.items():
        kind = OTHER_KINDS.get(f"POST {path}", OTHER_KINDS.get(path, SMALL_BODY))
        most = "--max-body-bytes" if kind.max_bytes is None else f"{kind.max_bytes:,} bytes"
        assert refusal["description"].endswith(f"a body has at most {most}")
        problem = "application/problem+json" in refusal["content"]
        assert problem != path.startswith("/v2/")  # in the form of the protocol


@pytest.mark.parametrize("path", ["/feedback", "/inbox/x/label", "/label-studio/webhook", "/jobs"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 30_000 + b"]" * 30_000, 400),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400),
        (b'{"label": ' + b"9" * 60_000 + b"}", 400),
        (b'{"label": 1e' + b"9" * 401 + b"}", 400),
        (b'{"label": ' + b"9" * 199 + b"}", 400),
        (b"[],".join([b""] * 21_000), 400),
        (b'{"\\ud800": 1}', 400),
        (b"\xff\xfe{\x00}\x00", 400),
        (b"", 400),
    ],
)
def test_hostile_json_is_malformed(steady: Live, path: str, body: bytes, status: int) -> None:
    if path == "/jobs" and not body:
        status = 409  # its body may be left out
    answer = steady.http.post(path, content=body, headers=HEADERS)
    assert_problem(answer, status)
    assert len(answer.content) < 2000


def test_json_of_too_many_values_is_refused_before_it_is_parsed(steady: Live) -> None:
    many = b'{"action": "x", "project": {"a": [' + b"[]," * 60_000 + b"[]]}}"
    answer = steady.http.post("/label-studio/webhook", content=many, headers=HEADERS)
    assert_problem(answer, 413, says="more than 100000 values")


def test_of_a_hundred_thousand_faults_the_first_is_told(steady: Live) -> None:
    wrong = b'{"action": "x", "annotations": [' + b"1," * 90_000 + b"1]}"
    answer = steady.http.post("/label-studio/webhook", content=wrong, headers=HEADERS)
    assert_problem(answer, 400, says="body.annotations.0: Input should be")
    assert "annotations.1:" not in answer.text


@pytest.mark.parametrize("kind", ["application/x+json", "application/json+json", "text/json", ""])
def test_no_other_type_of_json_gets_past_the_limits(steady: Live, kind: str) -> None:
    headers = {**HEADERS, "Content-Type": kind}
    answer = steady.http.post("/feedback", content=b'{"id": "x", "wrong": true}', headers=headers)
    assert_problem(answer, 415)


class Seen(BaseModel):
    text: str

    @field_validator("text")
    @classmethod
    def _notes_its_thread(cls, text: str) -> str:
        THREADS.append(threading.get_ident())
        return text


THREADS: list[int] = []
probe = APIRouter(route_class=needing(Permission.OPEN))


@probe.post("/probe")
async def probed(body: Seen) -> dict[str, int]:
    THREADS.append(threading.get_ident())
    return {"length": len(body.text)}


@probe.post("/large")
@taking(BodyKind(max_bytes=1 << 20))
async def probed_large(body: Seen | None = None) -> dict[str, int]:
    return {"length": len(body.text) if body else 0}


def ask(
    path: str, body: object, *, kind: str = "application/json", **settings: Any
) -> httpx.Response:
    made = Settings(store="absent", **settings)
    app = create_app(made, engine=TorchEngine(device="cpu", threads=1))
    app.include_router(probe)
    assert document(app)["paths"]["/probe"]["post"]["requestBody"]

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(path, content=content, headers={"Content-Type": kind})

    return asyncio.run(post())


@pytest.mark.parametrize("length", [10, AT_ONCE_BYTES])
def test_a_new_route_is_limited_and_a_long_body_is_parsed_once_on_a_thread(length: int) -> None:
    THREADS.clear()
    answer = ask("/probe", {"text": "x" * length})
    assert answer.json() == {"length": length}
    validated, answered = THREADS
    assert (validated == answered) == (length < AT_ONCE_BYTES)


def test_a_new_route_has_the_usual_limit_without_saying_so() -> None:
    long = {"text": "x" * (64 << 10)}
    assert ask("/probe", long).status_code == 413
    assert ask("/large", long).json() == {"length": 64 << 10}
    assert ask("/large", b"").json() == {"length": 0}
    assert ask("/probe", b"").status_code == 400
    assert ask("/probe", {"text": ""}, kind="application/x+json").status_code == 415
    wrong = ask("/probe", {"text": 3})
    assert json.loads(wrong.text)["detail"].startswith("body.text: ")


def test_the_setting_bounds_every_route() -> None:
    assert ask("/probe", {"text": "x" * 1000}, max_body_bytes=1000).status_code == 413
