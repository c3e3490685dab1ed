"""SIGTERM under load, many times: a request that the server has accepted is answered."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.campaigns import AddRow
from tests.live_server import wait_for
from tests.s3_server import free_ports
from tests.scale.fleet import Fleet, running, url_of
from tests.trained_store import TrainedStore

ROUNDS, AT_A_TIME, CLIENTS = 5, 4, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Asked:
    """Outcomes of clients that ask one server until its port is closed."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)

    def wait_for_more(self, count: int) -> None:
        before = self.answered
        wait_for(lambda: self.answered > before + count, seconds=60)

    def ask(self, port: int, image: bytes) -> None:
        with httpx.Client(base_url=url_of(port), timeout=60) as client:
            while True:
                try:
                    answer = client.post("/predict", content=image)
                except httpx.ConnectError:
                    return  # not accepted
                except httpx.TransportError as error:
                    self.failed.append(repr(error))
                    continue
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    self.failed.append(f"{answer.status_code} {answer.text[:200]}")


@contextmanager
def asking(fleet: Fleet, asked: Asked, image: bytes) -> Iterator[None]:
    threads = [
        threading.Thread(target=asked.ask, args=(port, image))
        for port in fleet.ports
        for _ in range(CLIENTS)
    ]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        for one in threads:
            one.join()


@pytest.mark.parametrize("drain_s", [1, 0])
def test_sigterm_under_load_fails_nothing_that_was_accepted(
    drain_s: int, trained_store: TrainedStore, tmp_path: Path, scale_row: AddRow
) -> None:
    asked, signals = Asked(), 0
    for _ in range(ROUNDS):
        fleet = Fleet(
            str(trained_store.location),
            ports=free_ports(AT_A_TIME),
            folder=tmp_path,
            settings={"DNE_DRAIN_SECONDS": str(drain_s)},
        )
        with running(fleet), asking(fleet, asked, trained_store.image("a")):
            asked.wait_for_more(100)
            for place, port in enumerate(fleet.ports):
                time.sleep(0.1 * place)
                fleet.processes[port].send_signal(signal.SIGTERM)
                signals += 1
            for process in fleet.processes.values():
                assert process.wait(timeout=60) == 0
    assert asked.failed == []
    scale_row(
        f"SIGTERM under load, --drain-seconds {drain_s}",
        f"{signals} times, {CLIENTS} clients a server that ask until the port is closed",
        f"{asked.answered} answered, {len(asked.failed)} failed that had been accepted",
    )
