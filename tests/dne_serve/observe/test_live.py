"""`GET /live`: what the server does now, as JSON and as a stream of events."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from dne_serve.access.permission import new_token
from dne_serve.app import create_app
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.errors import TooManyListeners
from dne_serve.observe.answer_counts import KEPT, Latencies
from dne_serve.observe.live import MOST_LISTENERS, SAME, Listener, Stream, event
from dne_serve.settings import Settings
from dne_serve.wire.server import DrainingServer, server_config
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import Live, assert_problem, live_server, png, wait_for
from tests.openapi_answers import Document
from tests.tiny_versions import promote, publish_tiny

EVENTS = {"Accept": "text/event-stream"}


@contextmanager
def listening(http: httpx.Client, **headers: str) -> Iterator[Iterator[str]]:
    """Yield the lines of the events, as they come."""
    with http.stream("GET", "/live", headers={**EVENTS, **headers}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (line for line in answer.iter_lines() if line)


def told(lines: Iterator[str]) -> dict[str, Any]:
    """The next event that has members."""
    line = next(one for one in lines if one.startswith("data: "))
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


@pytest.mark.long
def test_the_figures_are_those_of_the_answers(live: Live) -> None:
    before = live.http.get("/live").json()
    assert (before["version"], before["requests_per_second"], before["p50_ms"]) == (2, 0, None)
    assert before["answers"] is None
    answers = [live.predict(png(seed), png(seed + 1)).json() for seed in range(5)]
    labels = [one["top"][0]["label"] for answer in answers for one in answer["predictions"]]
    now = live.http.get("/live").json()
    document = Document(live.http)
    document.check(document.operation("get", "/live"), live.http.get("/live"))
    assert now["answers"]["images"] == len(labels)
    found = {one["label"]: one["images"] for one in now["answers"]["classes"]}
    assert found == {label: labels.count(label) for label in labels}
    assert (now["answers"]["unknown"], now["answers"]["others"]) == (0, 0)
    assert 0 < now["requests_per_second"] <= 0.5  # five in ten seconds, or fewer if it took long
    assert 0 < now["p50_ms"] <= now["p99_ms"]
    assert (now["queue"], now["queue_limit"], now["failed"]) == (0, 256, 0)
    assert now["swap"]["version"] == 2
    assert time.time() - now["swap"]["time"] < 60
    assert (now["canary"], now["shadow"]) == (None, None)


def test_a_swap_is_told_and_the_answers_are_those_of_the_new_version(live: Live) -> None:
    live.predict(png())
    live.admin("/rollback", to=1)
    now = live.http.get("/live").json()
    assert (now["version"], now["swap"]["version"], now["swap"]["count"]) == (1, 1, 2)
    assert now["answers"] is None


def test_canary_and_shadow_are_told_with_their_agreement(store: Store, digits: Manifest) -> None:
    third = publish_tiny(store, tasks=[("more", ["x", "y"])], parent=digits, seed=2)
    names = ("canary", "shadow")
    with live_server(store.location, canary=f"{third.version}=50%,shadow=1") as live:
        live.wait_until_ready()
        wait_for(lambda: None not in map(live.http.get("/readyz").json().get, names))
        images = [png(seed) for seed in range(10)]
        answers = [live.predict(image).json() for image in images]

        def label(image: bytes, version: int) -> str:
            [one] = live.predict(image, query=f"?version={version}").json()["predictions"]
            return str(one["label"])

        same = {"canary": 0, "shadow": 0}
        for image, answer in zip(images, answers, strict=True):
            name, version = ("canary", third.version) if answer["canary"] else ("shadow", 1)
            same[name] += label(image, version) == label(image, digits.version)
        now = live.http.get("/live").json()
        for name, version in (("canary", third.version), ("shadow", 1)):
            assert now[name]["version"] == version
            assert now[name]["same"] == same[name]
            assert now[name]["same"] + now[name]["other"] == 5
        assert (now["canary"]["answered"], now["shadow"]["answered"]) == (5, 0)
        counted = live.metric('dne_canary_images_total{label="same"}')
        assert counted == same["canary"]


@pytest.mark.long
def test_a_listener_gets_everything_at_first_and_then_what_has_changed(live: Live) -> None:
    whole = live.http.get("/live").json()
    with listening(live.http) as lines:
        first = told(lines)
        assert first.keys() == whole.keys()
        live.predict(png())
        changed = told(lines)
        assert {"requests_per_second", "p50_ms", "answers"} <= changed.keys()
        assert {"version", "channel", "queue_limit", "swap"}.isdisjoint(changed)
        assert live.metric("dne_requests_under_way") == 1  # that of /metrics itself
        assert live.metric('dne_requests_total{method="GET",route="/live",status="200"}') == 2


def test_nothing_new_is_told_in_three_bytes() -> None:
    assert event({"a": 1, "b": None}, known={}) == b'data: {"a":1,"b":null}\n\n'
    assert event({"a": 1, "b": None}, known={"a": 1, "b": None}) == SAME
    assert event({"a": 2, "b": None}, known={"a": 1, "b": None}) == b'data: {"a":2}\n\n'


def test_names_that_look_like_events_stay_inside_one(store: Store) -> None:
    hostile = "data: {}"
    promote(store, publish_tiny(store, tasks=[("odd", ["<b>", hostile, "x" * 200])]))
    with live_server(store.location) as live:
        live.wait_until_ready()
        for seed in range(20):
            live.predict(png(seed))
        with listening(live.http) as lines:
            first = told(lines)
    labels = {one["label"] for one in first["answers"]["classes"]}
    assert labels <= {"<b>", hostile, "x" * 59 + "…"}


@pytest.mark.long
def test_listeners_without_a_token_give_way_to_new_ones(live: Live) -> None:
    """Sixteen of one address shut out neither others of the address nor another address."""
    other = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        httpx.Client(base_url=live.url, timeout=30) as greedy,
        httpx.Client(base_url=live.url, timeout=30, transport=other) as modest,
        ExitStack() as stack,
    ):
        # Held, because httpx closes an answer whose lines nobody holds.
        held = [stack.enter_context(listening(greedy)) for _ in range(MOST_LISTENERS)]
        assert all(told(lines)["version"] == 2 for lines in held)
        for http in (modest, greedy):
            lines = stack.enter_context(listening(http))
            assert told(lines)["version"] == 2
        for gone in held[:2]:
            assert list(gone)[-1:] in ([], [":"])
        assert next(held[2])
        assert greedy.get("/live").status_code == 200  # a look is not a listener
        assert live.predict(png()).status_code == 200


def listeners(client: str, count: int, *, has_token: bool) -> list[Listener]:
    return [Listener(client=client, has_token=has_token) for _ in range(count)]


async def join(stream: Stream, *new: Listener) -> list[AsyncIterator[bytes]]:
    """Start streams. The caller holds them, because a stream that nobody holds ends."""
    streams = [stream.events(listener) for listener in new]
    for events in streams:
        await anext(events)
    return streams


@pytest.mark.parametrize("addresses", [1, MOST_LISTENERS])
def test_the_oldest_listener_without_a_token_gives_way(addresses: int) -> None:
    """From one address or from as many as there are places; a newcomer always gets a place."""

    async def run() -> None:
        stream = Stream(dict, ends=lambda: False)
        held = [
            Listener(client=f"http:10.0.0.{place % addresses}", has_token=False)
            for place in range(MOST_LISTENERS)
        ]
        streams = await join(stream, *held)
        for turn, client in enumerate(("http:10.0.1.1", "someone")):
            new = Listener(client=client, has_token=client == "someone")
            stream.check_room(new)
            streams += await join(stream, new)
            assert not new.is_over
            assert [listener.is_over for listener in held] == [
                place <= turn for place in range(MOST_LISTENERS)
            ]

    asyncio.run(run())


def test_a_listener_with_a_token_gives_way_only_to_another_token() -> None:
    async def run() -> None:
        stream = Stream(dict, ends=lambda: False)
        held = listeners("one", MOST_LISTENERS, has_token=True)
        streams = await join(stream, *held)
        [stranger, own] = (
            *listeners("http:10.0.0.1", 1, has_token=False),
            *listeners("one", 1, has_token=True),
        )
        for refused in (stranger, own):
            with pytest.raises(TooManyListeners, match="with tokens are open"):
                stream.check_room(refused)
        for other in listeners("two", MOST_LISTENERS // 2, has_token=True):
            stream.check_room(other)
            streams += await join(stream, other)
        with pytest.raises(TooManyListeners):  # both have the same share
            stream.check_room(listeners("two", 1, has_token=True)[0])
        assert [listener.is_over for listener in held] == [True] * 8 + [False] * 8

    asyncio.run(run())


def test_the_route_needs_the_scope_read_and_gives_places_back(
    store: Store, digits: Manifest, tmp_path: Any
) -> None:
    made = {scope: new_token(f"someone={scope}") for scope in ("read", "predict")}
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{one.line}\n" for one in made.values()))
    tokens.chmod(0o600)
    with live_server(store.location, token_file=tokens) as live:
        live.wait_until_ready()
        assert_problem(live.http.get("/live", headers=EVENTS), 401)
        wrong = {"Authorization": f"Bearer {made['predict'].secret}"}
        assert_problem(live.http.get("/live", headers={**EVENTS, **wrong}), 403)
        right = {"Authorization": f"Bearer {made['read'].secret}"}
        with ExitStack() as stack:
            held = [
                stack.enter_context(listening(live.http, **right)) for _ in range(MOST_LISTENERS)
            ]
            assert all(told(lines)["version"] == 2 for lines in held)
            answer = live.http.get("/live", headers={**EVENTS, **right})
            assert_problem(answer, 503, says="live views with tokens are open")
            assert answer.headers["retry-after"]

        def is_free() -> bool:
            with live.http.stream("GET", "/live", headers={**EVENTS, **right}) as again:
                return again.status_code == 200

        wait_for(is_free)


@pytest.mark.parametrize("drain_s", [0, 2])
def test_listeners_do_not_delay_the_end_of_a_server(
    store: Store, digits: Manifest, drain_s: float
) -> None:
    """The stream ends by itself, before a balancer is left and long before the grace of 15 s."""
    settings = Settings(store=store.location)
    app = create_app(settings, engine=TorchEngine(device="cpu", threads=1))
    server = DrainingServer(
        server_config(app, settings), drain_s=drain_s, on_drain=app.state.models.drain
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        with httpx.Client(base_url=url, timeout=30) as http, listening(http) as lines:
            told(lines)
            server.handle_exit(signal.SIGTERM, None)
            began = time.monotonic()
            assert all(line == ":" or line.startswith("data: ") for line in lines)
            assert time.monotonic() - began < 8
        thread.join(timeout=drain_s + 8)
        assert not thread.is_alive()


def test_the_pace_is_that_of_a_plain_list() -> None:
    now = 0.0
    latencies = Latencies(clock=lambda: now)
    assert latencies.pace().p50_ms is None
    for place in range(100):
        now = place * 0.5
        latencies.add(place / 1000, failed=place % 10 == 9)
    pace = latencies.pace()
    assert pace.requests_per_second == pytest.approx(2.1)  # both ends of ten seconds count
    good = sorted(place for place in range(100) if place % 10 != 9)
    assert pace.p50_ms == pytest.approx((good[44] + good[45]) / 2)
    assert pace.p99_ms == pytest.approx(98, abs=1)
    assert pace.failed == pytest.approx(0.1)
    now += 61
    assert latencies.pace().requests_per_second == 0
    assert latencies.pace().p99_ms is None


def test_more_requests_than_are_kept_still_give_their_rate() -> None:
    now = 0.0
    latencies = Latencies(clock=lambda: now)
    for place in range(3 * KEPT):
        now = place / 2000
        latencies.add(0.001, failed=False)
    assert latencies.pace().requests_per_second == pytest.approx(2000, rel=0.01)
