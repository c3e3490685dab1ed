"""SIGTERM: not ready at once, requests answered until the end, and nothing lost."""

from __future__ import annotations

import signal
import socket
import threading
import time

import httpx
import pytest

from dne_serve.app import create_app
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.settings import Settings
from dne_serve.wire import server as draining
from dne_serve.wire.server import DrainingServer, server_config
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.v2_requests import assert_error
from tests.dne_serve.test_cli import running
from tests.live_server import Live, assert_problem, png, wait_for


def test_a_server_that_drains_is_not_ready_and_answers(live: Live) -> None:
    live.serving.drain()
    answer = live.http.get("/readyz")
    assert_problem(answer, 503, says="about to stop")
    assert answer.json()["type"] == "urn:dne-serve:problem:draining"
    for path in ("/v2/health/ready", "/v2/models/dne/ready"):
        assert_error(live.http.get(path), 503, says="about to stop")
    assert live.http.get("/healthz").status_code == 200
    answered = live.predict(png())
    assert answered.status_code == 200
    assert answered.headers["connection"] == "close"  # the next request goes to another server


@pytest.mark.long
def test_sigterm_under_load_fails_no_request_of_a_balancer(store: Store, digits: Manifest) -> None:
    """The clients do as a balancer does: they ask while the server was ready a moment ago."""
    failed: list[str] = []
    answered = 0
    with running("--store", store.location, "--drain-seconds", "1") as (process, url):
        in_rotation = threading.Event()
        in_rotation.set()

        def check() -> None:
            while httpx.get(f"{url}/readyz").status_code == 200:
                time.sleep(0.05)
            in_rotation.clear()

        def ask() -> None:
            nonlocal answered
            with httpx.Client(base_url=url) as client:
                while in_rotation.is_set():
                    try:
                        answer = client.post("/predict", content=png())
                    except httpx.TransportError as error:
                        failed.append(repr(error))
                    else:
                        answered += answer.status_code == 200
                        failed.extend([answer.text] if answer.status_code != 200 else [])

        threads = [threading.Thread(target=one) for one in (check, ask, ask)]
        for one in threads:
            one.start()
        wait_for(lambda: answered > 20)
        process.send_signal(signal.SIGTERM)
        for one in threads:
            one.join()
        assert process.wait(timeout=20) == 0
    assert failed == []


def test_requests_on_open_connections_are_answered_after_the_port_is_closed(
    store: Store, digits: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection waits for its second request, the other one for its first."""
    monkeypatch.setattr(draining, "LINGER_S", 10.0)
    settings = Settings(store=store.location)
    app = create_app(settings, engine=TorchEngine(device="cpu", threads=1))
    server = DrainingServer(
        server_config(app, settings), drain_s=0, on_drain=app.state.models.only.drain
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started and app.state.models.only.loaded.served is not None)
        with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}") as idle:
            assert idle.post("/predict", content=png()).status_code == 200
            late = socket.create_connection(address, timeout=20)
            server.should_exit = True
            wait_for(lambda: refused(address))
            answer = idle.post("/predict", content=png())
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            with late:
                late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert late.recv(65536).startswith(b"HTTP/1.1 200")
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_connections_that_the_kernel_holds_are_taken_before_the_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        taken = list(draining._pending(listener))
    for here, there in zip(taken, clients, strict=True):
        with here, there:
            here.sendall(b"answer")
            assert there.recv(6) == b"answer"


def refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=20).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.long
def test_a_second_signal_and_ctrl_c_do_not_wait(store: Store, digits: Manifest) -> None:
    for signals in ([signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]):
        with running("--store", store.location, "--drain-seconds", "300") as (process, _):
            for number in signals:
                process.send_signal(number)
                time.sleep(0.3)
            assert process.wait(timeout=20) == 0
