"""A real server on a free port of this machine, inside the test's process."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn.server
from PIL import Image

from dne_serve.app import create_app
from dne_serve.engines.base import Engine
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.models import Models
from dne_serve.rollout.engine_switch import Auto
from dne_serve.server import Serving
from dne_serve.settings import FixedLimits, Settings
from dne_serve.wire.server import server_config
from model_store.records.channel import ChannelRecord

TOKEN = "a-token-for-tests"
POLL_SECONDS = 0.02
LONG_S = 20.0


class _Brisk:
    """Is asyncio to uvicorn, with shorter pauses: it takes two of 0.1 s to stop a server."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 5)


uvicorn.server.asyncio = _Brisk()  # type: ignore[assignment, attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    url: str
    http: httpx.Client
    serving: Serving
    models: Models

    def predict(self, *images: bytes, query: str = "", names: str = "{}.png") -> httpx.Response:
        files = [("files", (names.format(i), image)) for i, image in enumerate(images)]
        return self.http.post(f"/predict{query}", files=files)

    def admin(self, path: str, *, token: str | None = TOKEN, **body: Any) -> httpx.Response:
        # Bytes, because httpx refuses to send text that is not ASCII.
        headers = {b"Authorization": f"Bearer {token}".encode()} if token is not None else {}
        return self.http.post(path, json=body, headers=headers)

    def metric(self, line: str) -> float:
        """The value of one series, as Prometheus would read it; 0 while it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(one.split()[-1]) for one in lines if one.startswith(f"{line} ")), 0.0)

    def serving_of(self, name: str) -> Serving:
        """A model in memory, where there are many."""
        return next(one for one in self.models.loaded if one.name == name)

    @contextmanager
    def engine_held(self) -> Iterator[None]:
        """Inside, the engine thread is busy: whatever comes waits in the queue."""
        gate, busy = threading.Event(), threading.Event()

        def hold() -> None:
            busy.set()
            gate.wait(LONG_S)

        held = self.models.shared.batcher.call(hold)
        busy.wait(LONG_S)
        try:
            yield
        finally:
            gate.set()
            held.result(LONG_S)

    def history(self) -> list[ChannelRecord]:
        return self.serving.open_store().history(self.serving.settings.channel)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.http.get("/readyz").status_code == 200)

    def wait_until_serving(self, version: int) -> None:
        wait_for(lambda: self.http.get("/readyz").json().get("version") == version)


@contextmanager
def live_server(
    store: Path | str, *, engine: Engine | None = None, auto: Auto | None = None, **settings: Any
) -> Iterator[Live]:
    """`settings` may name fixed limits too."""
    names = {one.name for one in fields(FixedLimits)} & settings.keys()
    fixed = {name: settings.pop(name) for name in names}
    given = {"store": str(store), "poll_seconds": POLL_SECONDS, "admin_token": TOKEN, **settings}
    made = Settings(**given)
    made._fixed = FixedLimits(**fixed)
    app = create_app(made, engine=engine or TorchEngine(device="cpu", threads=1), auto=auto)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(server_config(app, made))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            with httpx.Client(base_url=url, timeout=30) as http:
                yield Live(
                    url=url, http=http, serving=app.state.models.only, models=app.state.models
                )
        finally:
            app.state.models.drain()  # as the server of the command does: live views end
            server.should_exit = True
            thread.join()


def wait_for(condition: Callable[[], bool], *, seconds: float = LONG_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.01)


def assert_problem(answer: httpx.Response, status: int, *, says: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body.keys() >= {"type", "title", "status", "detail", "instance"}
    assert says in body["detail"]
    assert "Traceback" not in answer.text


def png(seed: int = 0, *, size: int = 8) -> bytes:
    """A small image of noise; another one for every seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
