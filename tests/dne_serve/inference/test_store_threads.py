"""A store that hangs or is large keeps nobody from being answered who does not need it."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from starlette.requests import ClientDisconnect

from dne_serve.engines.base import Resident
from dne_serve.errors import Stopped, StoreBusy, WaitedTooLong
from dne_serve.inference.store_threads import (
    CLIENT_GONE,
    MAX_LOADS,
    Deadline,
    Loads,
    StoreThreads,
    check_wanted,
)
from dne_serve.shared import STORE_READS
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.dne_serve.wire.test_limits import connect
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.model_store.backends import MemoryObjects, WatchedObjects

CLIENTS = 60
"""More than the threads that the framework shares among all plain functions."""


class HangingObjects(WatchedObjects):
    """A backend that does not answer while `answers` is not set."""

    def __init__(self) -> None:
        super().__init__(MemoryObjects(), before=lambda verb, name: self._hang())
        self.answers = threading.Event()
        self.answers.set()

    def _hang(self) -> None:
        assert self.answers.wait(60)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingObjects]:
    """What every location means."""
    objects = HangingObjects()
    monkeypatch.setattr("model_store.store.store.objects_at", lambda location: objects)
    store = Store.create("far-away", objects=objects)
    publish_digits(store, publish_letters(store))
    yield objects
    objects.answers.set()


@pytest.fixture
def max_wait_s() -> float:
    return 0.5


@pytest.fixture
def hung(objects: HangingObjects, max_wait_s: float) -> Iterator[Live]:
    """Serves version 2 of a store that has just stopped answering."""
    with live_server(Path("far-away"), max_wait_seconds=max_wait_s) as live:
        live.wait_until_serving(2)
        objects.answers.clear()
        try:
            yield live
        finally:
            objects.answers.set()


def ask_often(live: Live, pool: ThreadPoolExecutor, path: str) -> list[Future[httpx.Response]]:
    return [pool.submit(live.http.get, path) for _ in range(CLIENTS)]


def large_json() -> bytes:
    """More than is read on the event loop."""
    text = json.dumps({"images": [base64.b64encode(png(size=200)).decode()]}).encode()
    assert len(text) > 100_000
    return text


def test_whether_a_version_is_ready_is_answered_from_memory(
    hung: Live, objects: HangingObjects
) -> None:
    asked = len(objects.calls)
    statuses = {n: hung.http.get(f"/v2/models/dne/versions/{n}/ready") for n in (1, 2, 9)}
    assert [one.status_code for one in statuses.values()] == [404, 200, 404]
    mine, other = (statuses[n].json()["error"] for n in (1, 9))
    assert mine.replace("1", "9") == other  # whether there is one is told to nobody
    assert len(objects.calls) - asked <= 1  # the server's own look at the channel


@pytest.mark.long
@pytest.mark.parametrize("max_wait_s", [60])
def test_requests_that_hang_with_the_store_leave_predictions_alone(
    hung: Live, objects: HangingObjects
) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = ask_often(hung, pool, "/versions/1")
        try:
            wait_for(lambda: hung.serving.readers.count == CLIENTS)
            headers = {"Content-Type": "application/json"}
            answer = hung.http.post("/predict", content=large_json(), headers=headers)
            assert (answer.status_code, answer.json()["version"]) == (200, 2)
            assert hung.http.get("/v2/models/dne/versions/1/ready").status_code == 404
        finally:
            objects.answers.set()
        wait(asking)
    assert {one.result().status_code for one in asking} == {200}


def test_a_read_that_is_still_queued_at_its_deadline_is_503_and_never_runs(
    hung: Live, objects: HangingObjects
) -> None:
    readers = hung.serving.readers
    with ThreadPoolExecutor(STORE_READS) as pool:
        asking = [pool.submit(hung.http.get, "/versions/1") for _ in range(STORE_READS)]
        try:
            wait_for(lambda: readers.count == STORE_READS)
            asked = len(objects.calls)
            late = hung.http.get("/versions/2")
            assert_problem(late, 503, says="has waited 0.5 s")
            assert late.headers["Retry-After"] == "1"
            assert readers.count == STORE_READS
        finally:
            objects.answers.set()
        wait(asking)
    assert {one.result().status_code for one in asking} == {200}
    assert ("read", "versions/00000002.json") not in objects.calls[asked:]


@pytest.mark.parametrize("max_wait_s", [60])
def test_a_read_whose_client_has_gone_never_runs(hung: Live, objects: HangingObjects) -> None:
    readers = hung.serving.readers
    with ThreadPoolExecutor(STORE_READS) as pool:
        asking = [pool.submit(hung.http.get, "/versions/1") for _ in range(STORE_READS)]
        try:
            wait_for(lambda: readers.count == STORE_READS)
            with connect(hung, "GET /versions/2 HTTP/1.1\r\nHost: localhost\r\n\r\n"):
                wait_for(lambda: readers.count == STORE_READS + 1)
            asked = len(objects.calls)
            hung.http.get("/healthz")  # the server has read the end of the connection
        finally:
            objects.answers.set()
        wait(asking)
    wait_for(lambda: readers.count == 0)
    assert ("read", "versions/00000002.json") not in objects.calls[asked:]


@pytest.mark.parametrize("max_wait_s", [60])
def test_labels_that_hang_with_the_store_leave_threads_for_readers(
    hung: Live, objects: HangingObjects
) -> None:
    labellers, readers = hung.serving.labellers, hung.serving.readers
    item = "20261117t120000000-0123456789ab"
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(hung.admin, f"/inbox/{item}/label", label="a") for _ in range(8)]
        wait_for(lambda: labellers.count == 8)
        assert readers.count == 0
        objects.answers.set()
        wait(asking)
    assert {one.result().status_code for one in asking} == {404}


def test_work_stops_where_it_is_whole_when_its_client_has_gone() -> None:
    done: list[int] = []
    gone = threading.Event()

    def work() -> None:
        for n in range(100):
            check_wanted()
            done.append(n)
            if n == 2:
                gone.set()

    async def ask() -> None:
        CLIENT_GONE.set(gone.is_set)
        threads = StoreThreads("t", threads=1, waiting=0)
        with pytest.raises(ClientDisconnect):
            await threads.run(work)
        with pytest.raises(ClientDisconnect):
            await threads.run(work)
        threads.stop(wait=True)

    asyncio.run(ask())
    assert done == [0, 1, 2]
    check_wanted()  # other work is always wanted


def test_work_stops_when_the_server_stops_and_no_more_begins() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert stopped.wait(20)
        check_wanted()

    async def ask() -> None:
        threads = StoreThreads("t", threads=1, waiting=1)
        first, second = (asyncio.ensure_future(threads.run(work)) for _ in range(2))
        await asyncio.to_thread(begun.wait, 20)
        threads.stop(wait=False)
        assert threads.is_busy
        stopped.set()
        for one in (first, second):
            with pytest.raises(Stopped):
                await one
        assert not threads.is_busy

    asyncio.run(ask())


@pytest.mark.long
def test_a_version_that_does_not_come_in_time_is_503_and_there_for_the_next_one(
    hung: Live, objects: HangingObjects
) -> None:
    assert_problem(hung.predict(png(), query="?version=1"), 503, says="has waited 0.5 s")
    assert_problem(hung.predict(png(), query="?version=1"), 503, says="has waited 0.5 s")
    assert len(hung.serving.predictor._loads._loading) == 1  # both waited for the same load
    objects.answers.set()
    wait_for(lambda: hung.metric("dne_resident_versions") == 2)
    assert hung.predict(png(), query="?version=1").json()["version"] == 1


def test_who_may_not_read_is_not_told_what_else_there_is(
    objects: HangingObjects, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("reader read sha256:" + "0" * 64)
    with live_server(Path("far-away"), token_file=tmp_path / "tokens") as live:
        live.wait_until_serving(2)
        for path in ("/versions", "/v2/models/dne", "/v2/models/dne/versions/1", "/classes"):
            assert live.http.get(path).status_code == 401
        assert live.http.post("/v2/repository/index", json={}).status_code == 401
        objects.calls.clear()
        answer = live.predict(png(), query="?version=9")
        assert_problem(answer, 404)
        assert answer.json()["detail"] == "there is no version 9"
        assert ("list", "versions") not in objects.calls  # nor does asking cost a listing


def test_more_than_may_wait_are_refused_at_once() -> None:
    gate = threading.Event()

    async def crowd() -> None:
        threads = StoreThreads("t", threads=2, waiting=3)
        waiting = [asyncio.ensure_future(threads.run(gate.wait)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(StoreBusy, match="5 requests wait for the store already"):
            await threads.run(gate.wait)
        gate.set()
        assert await asyncio.gather(*waiting) == [True] * 5
        assert await threads.run(gate.wait)
        threads.stop(wait=True)

    asyncio.run(crowd())


def test_loads_are_bounded_shared_and_fail_without_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def load(version: int) -> Resident:
        begun.append(version)
        gate.wait(20)
        raise ValueError(f"version {version}")

    async def crowd() -> None:
        loads = Loads(load)
        for version in range(MAX_LOADS):
            with pytest.raises(WaitedTooLong):
                await loads.get(version, deadline=Deadline(0.0))
        with pytest.raises(StoreBusy):
            await loads.get(99, deadline=Deadline(0.0))
        joined = asyncio.ensure_future(loads.get(0))
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(ValueError, match="version 0"):
            await joined
        loads.stop()

    asyncio.run(crowd())
    assert begun[0] == 0
    assert len(begun) == len(set(begun))
    assert not caplog.records
