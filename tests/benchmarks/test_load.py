"""The client of the benchmarks: it must not miss what it is there to see."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.changes import Served, late
from benchmarks.serving.load import FAILED, Reply, Request, Seen, Traffic

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"version":7}'
REFUSAL = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"
WALK = [Served(0.0, 1), Served(10.0, 2), Served(20.0, 1), Served(30.0, 3)]


def seen(*replies: Reply) -> Seen:
    return Seen(replies=replies, unsent=0, processor_s=0.0)


def reply(ended_s: float, version: int = 1, *, connection: int = 0, status: int = 200) -> Reply:
    return Reply(connection, ended_s - 0.5, ended_s, status, version)


def test_an_answer_of_a_version_that_has_been_replaced_is_late() -> None:
    in_order = [reply(5), reply(10.1, 1), reply(11, 2), reply(21, 1), reply(31, 3)]
    assert late(seen(*in_order), WALK) == 0
    assert late(seen(*in_order, reply(12, 1)), WALK) == 1
    assert late(seen(*in_order, reply(12, 1, connection=1)), WALK) == 0
    assert late(seen(*in_order, reply(25, 2)), WALK) == 1


def test_gaps_quantiles_and_rates_are_of_what_was_answered() -> None:
    some = seen(reply(1), reply(2), reply(6), reply(4, status=503), reply(7))
    assert some.longest_gap_s == 4
    assert some.failed == 1
    assert some.per_second == 3 / 6
    assert some.quantile_s(0.99) == 0.5
    assert len(some.between(2, 7).replies) == 3


@pytest.fixture
def answering() -> Iterator[tuple[int, list[bytes]]]:
    """A server that takes one answer after the other from a list, and closes when it is empty."""
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while connection.recv(65536):
                        if not answers:
                            break
                        connection.sendall(answers.pop(0))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], answers
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_every_answer_refusal_and_broken_connection_is_seen(
    answering: tuple[int, list[bytes]], tmp_path: Path
) -> None:
    port, answers = answering
    answers += [ANSWER, REFUSAL, ANSWER]
    request = Request(path="/", kind="image/png", body=b"pixels")
    traffic = Traffic(request, port=port, folder=tmp_path, connections=1, seconds=0.5)
    found = traffic.seen()
    assert [(one.status, one.version) for one in found.replies[:3]] == [
        (200, 7),
        (503, 0),
        (200, 7),
    ]
    assert {one.status for one in found.replies[3:]} == {FAILED}
    assert found.replies[3:]
    assert all(one.began_s <= one.ended_s for one in found.replies)
