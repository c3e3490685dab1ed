"""Bodies whose last byte never comes. A short form is in tests/dne_serve/http/test_room.py."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from contextlib import suppress

import pytest

from dne_serve.settings import load_settings
from tests.abuse.victim import Answer, Client, Victim
from tests.campaigns import AddRow
from tests.live_server import png

ATTACK_S = 70  # longer than a body may take
AGAIN_S = 3.0
ROOM = load_settings().fixed.max_buffered_bytes
BODY = load_settings().max_body_bytes
HEAD = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"


def withheld(body: bytes, *, coding: str) -> bytes:
    """A request that lacks the last bytes of its body."""
    head = f"{HEAD}Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body[:-8]


def filling(total: int) -> bytes:
    """A compressed body that would take so many bytes together with what it inflates to."""
    packed = len(gzip.compress(bytes(total)))
    return gzip.compress(bytes(total - packed))


def hold(victim: Victim, request: bytes, *, times: int, done: threading.Event) -> None:
    """Keep so many unfinished requests open, and open them anew when they have been ended."""
    held: list[socket.socket] = []
    while not done.is_set():
        held = [one for one in held if not was_ended(one)]
        for _ in range(times - len(held)):
            with suppress(OSError):
                held.append(victim.connect(request))
        done.wait(AGAIN_S)
    for one in held:
        one.close()


def was_ended(connection: socket.socket) -> bool:
    """Whether the server has said anything to a client that still owes it the last bytes."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it was reset
    connection.close()
    return True


def ask_on(victim: Victim, *, seconds: float) -> tuple[list[Answer], list[Answer]]:
    """Usual predictions, and large bodies now and then."""
    usual: list[Answer] = []
    large: list[Answer] = []
    end = time.monotonic() + seconds
    with Client(victim) as client, Client(victim) as other:
        while time.monotonic() < end:
            usual.append(client.predict(png(len(usual) % 50, size=64)))
            if len(usual) % 100 == 0:
                with suppress(OSError):
                    large.append(other.predict(bytes(8 << 20)))
            time.sleep(0.01)
    return usual, large


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("coding", ["gzip", "identity"])
def test_usual_requests_are_answered_while_unfinished_bodies_fill_the_room(
    victim: Victim, coding: str, abuse_row: AddRow
) -> None:
    times = 79 if coding == "gzip" else ROOM // BODY
    body = filling(ROOM // times) if coding == "gzip" else bytes(BODY - 1000)
    request, done = withheld(body, coding=coding), threading.Event()
    holding = threading.Thread(
        target=hold, args=(victim, request), kwargs={"times": times, "done": done}
    )
    victim.forget_peak()
    holding.start()
    try:
        time.sleep(2)
        usual, large = ask_on(victim, seconds=ATTACK_S)
    finally:
        done.set()
        holding.join()
    assert {answer.status for answer in usual} == {200}
    let_in = sum(answer.status != 503 for answer in large)
    assert let_in >= 0.8 * len(large)
    taken = sorted(answer.seconds for answer in usual)
    abuse_row(
        f"unfinished bodies, {coding}",
        f"{times} that lack their last bytes, {times * len(request) / 2**20:.1f} MiB in all, sent "
        f"anew whenever they are ended, for {ATTACK_S} s",
        f"{len(usual):,} usual requests all answered, median {1000 * taken[len(taken) // 2]:.1f} "
        f"ms; {let_in} of {len(large)} bodies of 8 MiB let in; memory at most "
        f"{victim.peak_bytes() / 2**20:.0f} MiB",
    )
