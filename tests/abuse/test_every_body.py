"""Every route gets the worst bodies that its limit allows. A short form, which shows that every
route has a limit, is in tests/dne_serve/http/test_body_limits.py."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from dne_serve.http.scoped_route import ScopedRoute
from dne_serve.settings import load_settings
from tests.abuse.victim import Client, Victim
from tests.abuse.worst_bodies import Body, worst_bodies, worst_of_label_studio
from tests.campaigns import AddRow
from tests.dne_serve.every_route import path_of, reads_bodies, scoped_routes
from tests.live_server import TOKEN, png

TOKEN_HEADER = f"Authorization: Bearer {TOKEN}\r\n"
SENDERS = 4
SILENT_S = 5.0
"""The longest that `/healthz` may take while bodies are sent."""
MOST = load_settings().max_body_bytes
MEMORY = 6 * SENDERS * MOST
"""A body is in memory as its pieces, as a whole and as what is parsed of it."""
SMALL = 64 << 10


def request_of(route: ScopedRoute, body: Body) -> bytes:
    head = (
        f"POST {path_of(route)} HTTP/1.1\r\nHost: localhost\r\n{TOKEN_HEADER}"
        f"Content-Type: {body.kind}\r\nContent-Encoding: {body.coding}\r\n"
        f"Content-Length: {len(body.data)}\r\n\r\n"
    )
    return head.encode() + body.data


@dataclass(slots=True)
class Pulse:
    """Asks `/healthz` on and on while bodies are sent, and notes the longest time that it took."""

    victim: Victim
    longest: tuple[float, str] = (0.0, "")
    asked: int = 0

    @contextmanager
    def beating(self, name: str) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(name, done))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, name: str, done: threading.Event) -> None:
        with Client(self.victim) as client:
            while not done.wait(0.01):
                answer = client.get("/healthz")
                assert answer.status == 200
                self.longest = max(self.longest, (answer.seconds, name))
                self.asked += 1


def send(victim: Victim, request: bytes) -> int:
    with Client(victim) as client:
        return client.send(request).status


def bodies_for(route: ScopedRoute) -> Iterator[Body]:
    most = route.takes.most_bytes(MOST)
    yield from worst_bodies(most)
    yield from worst_of_label_studio(
        route.path, most_bytes=most, most_values=route.takes.max_json_values
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_body_of_any_route_silences_the_server(victim: Victim, abuse_row: AddRow) -> None:
    statuses: Counter[int] = Counter()
    slowest, pulse = (0.0, ""), Pulse(victim)
    before = victim.resident_bytes()
    grown = {True: (0, ""), False: (0, "")}
    routes = [route for route in scoped_routes() if "POST" in (route.methods or ())]
    with ThreadPoolExecutor(SENDERS) as senders:
        for route, body in ((one, body) for one in routes for body in bodies_for(one)):
            name, requests = f"{body.name} to {route.path}", [request_of(route, body)] * SENDERS
            victim.forget_peak()
            began_s = time.monotonic()
            with pulse.beating(name):
                found = list(senders.map(partial(send, victim), requests))
            slowest = max(slowest, (time.monotonic() - began_s, name))
            statuses.update(found)
            assert all(one < 500 or one == 503 for one in found), (name, found)
            is_small = route.takes.most_bytes(MOST) == SMALL
            grown[is_small] = max(grown[is_small], (victim.peak_bytes() - before, name))
    bring_back = (
        f"POST /v2/repository/models/dne/load HTTP/1.1\r\nHost: localhost\r\n{TOKEN_HEADER}"
    )
    with Client(victim) as client:
        client.send(f"{bring_back}Content-Length: 0\r\n\r\n".encode())  # some body has unloaded it
        assert client.predict(png()).status == 200
    assert pulse.longest < (SILENT_S, "")
    assert grown[False] < (MEMORY, "")
    reading = sum(map(reads_bodies, routes))
    told = ", ".join(f"{status} × {count:,}" for status, count in sorted(statuses.items()))
    abuse_row(
        "the worst body of every route",
        f"{sum(statuses.values()):,} bodies as long as the limit of each of {len(routes)} routes, "
        f"of which {reading} read them, {SENDERS} at a time: lists, keys, numbers, texts, depth, "
        "bombs, forms, XML",
        f"{told}; /healthz took at most {pulse.longest[0]:.2f} s of {pulse.asked:,} "
        f"({pulse.longest[1]}); memory at most +{grown[False][0] / 2**20:.0f} MiB "
        f"({grown[False][1]}), +{grown[True][0] / 2**20:.0f} MiB where the limit is 64 KiB; "
        f"slowest {slowest[0]:.1f} s ({slowest[1]})",
    )
