"""How the bodies of all requests share their budget. `make test SUITE=abuse` has the long form."""

from __future__ import annotations

import gzip
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from dne_serve.http.bodies import STALLED_S, STEP_BYTES, MemoryBudget, Reservation
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_letters
from tests.dne_serve.fake_engine import Clock
from tests.dne_serve.wire.test_limits import HEAD, assert_raw_problem, connect, rest
from tests.live_server import Live, assert_problem, live_server, png, wait_for

MIB = 1 << 20
BODY = MIB
ROOM = 4 * MIB


def room(clock: Clock | None = None) -> MemoryBudget:
    return MemoryBudget(512 * MIB, max_body_bytes=32 * MIB, clock=clock or Clock())


def fill(budget: MemoryBudget, count: int, *, size: int, address: str = "a") -> list[Reservation]:
    claims = [budget.reservation(address) for _ in range(count)]
    for reservation in claims:
        reservation.take(size)
    return claims


def test_a_quarter_is_kept_for_small_bodies() -> None:
    shared = room()
    fill(shared, 12, size=32 * MIB)
    with pytest.raises(HTTPException, match="503"):
        shared.reservation("a").take(5 * MIB)
    fill(shared, 32, size=4 * MIB)
    with pytest.raises(HTTPException, match="503"):
        shared.reservation("a").take(1)


def test_one_body_of_the_largest_size_always_gets_in() -> None:
    shared = MemoryBudget(40 * MIB, max_body_bytes=32 * MIB)
    shared.reservation("a").take(32 * MIB)


def test_whoever_has_stalled_for_longest_makes_room() -> None:
    clock = Clock()
    shared = room(clock)
    claims = []
    for _ in range(12):
        claims += fill(shared, 1, size=32 * MIB)
        clock.now += STALLED_S
    shared.reservation("b").take(32 * MIB)
    with pytest.raises(HTTPException, match="stalled"):
        claims[0].take(1)
    claims[1].take(1)


def test_bodies_that_arrive_steadily_or_have_arrived_are_not_let_go() -> None:
    clock = Clock()
    shared = room(clock)
    steady, finished = fill(shared, 1, size=MIB)[0], fill(shared, 11, size=32 * MIB)
    for reservation in finished:
        reservation.is_finished = True
    for _ in range(10):
        clock.now += STALLED_S / 2
        steady.take(STEP_BYTES)
    with pytest.raises(HTTPException, match="together"):
        shared.reservation("b").take(32 * MIB)
    clock.now += STALLED_S / 2
    steady.take(1)  # a byte now and then is no progress
    clock.now += STALLED_S / 2
    shared.reservation("b").take(32 * MIB)


def test_a_slow_client_stays_while_another_address_holds_more() -> None:
    clock = Clock()
    shared = room(clock)
    slow = fill(shared, 1, size=8 * MIB, address="slow")[0]
    clock.now += 30
    fill(shared, 11, size=32 * MIB, address="greedy")
    clock.now += STALLED_S
    fill(shared, 5, size=32 * MIB, address="other")
    slow.take(STEP_BYTES)


def test_what_was_let_go_of_is_free_once() -> None:
    shared = room()
    for _ in range(3):
        for reservation in fill(shared, 12, size=32 * MIB):
            reservation.let_go()
            reservation.let_go()


def test_freed_memory_goes_back_after_many_large_bodies_and_not_after_small_ones() -> None:
    given_back: list[None] = []
    shared = MemoryBudget(
        512 * MIB, max_body_bytes=32 * MIB, on_freed=lambda: given_back.append(None)
    )
    for reservation in fill(shared, 64, size=4 * MIB):
        reservation.let_go()
    assert not given_back
    for count in range(1, 9):
        fill(shared, 1, size=32 * MIB)[0].let_go()
        assert len(given_back) == count // 4


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    store = Store.create(str(tmp_path_factory.mktemp("narrow") / "models"))
    publish_letters(store)
    settings: dict[str, Any] = {"max_body_bytes": BODY, "max_buffered_bytes": ROOM}
    with live_server(Path(store.location), **settings) as live:
        live.wait_until_ready()
        yield live


def withheld(body: bytes, *, coding: str = "identity") -> bytes:
    """A request without its last byte."""
    head = f"{HEAD}Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body[:-1]


def hold(live: Live, stack: ExitStack, sent: bytes, *, times: int) -> list[socket.socket]:
    """Connections that owe a byte each, once the server has read the rest."""
    # Those that the test before has left end on their own; the question itself counts as one.
    wait_for(lambda: live.metric("dne_requests_under_way") <= 1)
    held = [stack.enter_context(connect(live, sent)) for _ in range(times)]
    wait_for(lambda: live.metric("dne_requests_under_way") >= 1 + times)
    time.sleep(0.2)
    return held


def post(live: Live, body: bytes) -> httpx.Response:
    return live.http.post("/predict", content=body, headers={"Content-Type": "image/png"})


@pytest.mark.long
def test_unfinished_compressed_bodies_take_what_was_sent(narrow: Live) -> None:
    packed = gzip.compress(bytes(BODY - 1000))
    with ExitStack() as stack:
        hold(narrow, stack, withheld(packed, coding="gzip"), times=20)
        for seed in range(10):
            assert narrow.predict(png(seed)).status_code == 200
        assert_problem(post(narrow, bytes(BODY - 1000)), 422)


@pytest.mark.long
def test_unfinished_bodies_make_room_when_they_have_stalled(narrow: Live) -> None:
    with ExitStack() as stack:
        first, *_ = hold(narrow, stack, withheld(bytes(BODY - 1000)), times=3)
        assert narrow.predict(png()).status_code == 200  # out of the reserve
        time.sleep(STALLED_S)
        assert_problem(post(narrow, bytes(BODY - 1000)), 422)
        answer = rest(first)
        assert_raw_problem(answer, 503)
        assert b"send it again" in answer


def test_a_large_compressed_body_is_inflated_whole(narrow: Live) -> None:
    """Noise that does not compress, then zeros that do: many slices, and many pieces of one."""
    image = png() + random.Random(5).randbytes(400_000) + bytes(500_000)
    headers = {"Content-Type": "image/png", "Content-Encoding": "gzip"}
    answer = narrow.http.post("/predict", content=gzip.compress(image), headers=headers)
    assert answer.status_code == 200, answer.text
    for spoilt in (gzip.compress(image)[:-1], gzip.compress(image) + b"x" * 70_000):
        assert_problem(narrow.http.post("/predict", content=spoilt, headers=headers), 400)
