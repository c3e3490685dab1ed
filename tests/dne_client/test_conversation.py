"""The client sends again what does no harm, waits as it is told, and names what went wrong."""

from __future__ import annotations

import httpx
import pytest

from dne_client import (
    BadImage,
    BadRequest,
    Busy,
    ClientError,
    Conflict,
    NotAllowed,
    NotFound,
    NotUnderstood,
    Refused,
    Retries,
    ServerFault,
    TooLarge,
    Unreachable,
)
from tests.dne_client.fake_server import FakeServer, answer, refusal

PIXELS = b"any bytes"


def test_a_busy_server_is_asked_again_until_it_answers() -> None:
    server = FakeServer(refusal(503, retry_after="0"), refusal(429, retry_after="0"), answer("cat"))
    assert server.client().predict(PIXELS).label == "cat"
    assert len(server.requests) == 3


def test_retry_after_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("dne_client.clients.time.sleep", waited.append)
    FakeServer(refusal(503, retry_after="7"), answer("cat")).client().predict(PIXELS)
    assert 7 <= waited[0] <= 7 * 1.25


def test_a_server_that_asks_for_an_hour_is_not_waited_for() -> None:
    server = FakeServer(refusal(503, retry_after="3600"))
    with pytest.raises(Busy) as found:
        server.client().predict(PIXELS)
    assert found.value.retry_after_s == 3600


def test_the_client_gives_up_after_its_attempts() -> None:
    server = FakeServer(*[refusal(503, retry_after="0")] * 9)
    with pytest.raises(Busy):
        server.client(retries=Retries(attempts=3, first_wait_s=0)).predict(PIXELS)
    assert len(server.requests) == 3


def test_waits_double_and_stay_below_the_longest() -> None:
    retries = Retries(attempts=9, first_wait_s=1, longest_wait_s=5)
    waits = [retries.wait_s(attempt, asked_s=None) for attempt in range(1, 10)]
    assert waits[-1] is None
    assert all(
        least <= (wait or 0) <= 1.25 * least
        for least, wait in zip([1, 2, 4, 5, 5, 5, 5, 5], waits, strict=False)
    )


@pytest.mark.parametrize("fault", [httpx.ReadError("cut"), httpx.ReadTimeout("late")])
def test_a_broken_prediction_is_sent_again_and_a_broken_move_is_not(fault: Exception) -> None:
    assert FakeServer(fault, answer("cat")).client().predict(PIXELS).label == "cat"
    server = FakeServer(fault, answer("cat"))
    with pytest.raises(Unreachable):
        server.client().rollback(reason="test")
    assert len(server.requests) == 1


def test_a_move_that_never_arrived_is_sent_again() -> None:
    moved = {"version": 2, "channel": "production", "record": {"number": 5}}
    server = FakeServer(httpx.ConnectError("refused"), httpx.Response(200, json=moved))
    assert server.client().promote(2).record == 5


def test_a_busy_server_moves_nothing_twice() -> None:
    server = FakeServer(refusal(503, retry_after="0"))
    with pytest.raises(Busy):
        server.client().resume()
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, NotAllowed),
        (403, NotAllowed),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (415, BadRequest),
        (422, BadImage),
        (500, ServerFault),
    ],
)
def test_each_status_has_an_error_that_names_the_reason(status: int, kind: type[Refused]) -> None:
    server = FakeServer(refusal(status, detail="a.png is no image"))
    with pytest.raises(kind, match=r"a\.png is no image") as found:
        server.client().predict(PIXELS)
    assert (found.value.status, found.value.instance) == (status, "urn:1")


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, text="<html>a proxy's page</html>"),
        httpx.Response(200, json={"hello": "world"}),
        httpx.Response(200, json=[1]),
    ],
)
def test_an_answer_of_something_else_is_told_apart(reply: httpx.Response) -> None:
    with pytest.raises(NotUnderstood):
        FakeServer(reply).client().predict(PIXELS)


def test_a_proxys_error_page_is_no_traceback() -> None:
    with pytest.raises(ServerFault, match="502"):
        FakeServer(httpx.Response(502, text="<html>")).client().predict(PIXELS)


def test_every_error_is_one_of_the_clients() -> None:
    assert issubclass(Refused, ClientError)
    assert issubclass(Unreachable, ClientError)


def test_the_oldest_version_that_is_accepted_travels_as_a_header() -> None:
    server = FakeServer(answer("cat"))
    server.client(token="secret").predict(PIXELS, at_least=7, top_k=2, version=9)
    (request,) = server.requests
    assert request.headers["dne-at-least"] == "7"
    assert request.headers["authorization"] == "Bearer secret"
    assert dict(request.url.params) == {"top_k": "2", "version": "9"}
