"""Bodies without end."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.abuse.victim import Client, Victim
from tests.campaigns import AddRow
from tests.live_server import png

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
PIECE = bytes(1 << 20)
SLACK_BYTES = 64 << 20
SHORT, LONG = 100 << 20, 1 << 30


def send_on(connection: socket.socket, total: int, *, sized: bool) -> None:
    """All of it, or until the server has had enough."""
    piece = PIECE if sized else b"%x\r\n%s\r\n" % (len(PIECE), PIECE)
    try:
        for _ in range(total >> 20):
            connection.sendall(piece)
        if not sized:
            connection.sendall(b"0\r\n\r\n")
    except OSError:
        return


def status_of(victim: Victim, total: int, *, sized: bool) -> int:
    how = b"Content-Length: %d" % total if sized else b"Transfer-Encoding: chunked"
    with victim.connect(HEAD + how + b"\r\n\r\n") as connection:
        sending = threading.Thread(
            target=send_on, args=(connection, total), kwargs={"sized": sized}
        )
        sending.start()
        answer = connection.recv(65536)
        sending.join()
    return int(answer[9:12])


@pytest.mark.parametrize("sized", [True, False])
def test_a_body_over_the_limit_is_413_and_memory_stays_flat(victim: Victim, sized: bool) -> None:
    """The short form."""
    before = victim.resident_bytes()
    victim.forget_peak()
    assert status_of(victim, SHORT, sized=sized) == 413
    assert victim.peak_bytes() - before < SLACK_BYTES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bodies_of_a_gigabyte(victim: Victim, abuse_row: AddRow) -> None:
    before = victim.resident_bytes()
    victim.forget_peak()
    for sized in (True, False):
        for _ in range(5):
            assert status_of(victim, LONG, sized=sized) == 413
    grown = victim.peak_bytes() - before
    assert grown < SLACK_BYTES
    with Client(victim) as client:
        assert client.predict(png()).status == 200
    abuse_row(
        "bodies of 1 GiB",
        "5 with Content-Length, 5 without",
        f"all 413; memory at most +{grown / 2**20:.0f} MiB (limit of a body: 32 MiB)",
    )
