"""Clients that never finish. A short form is in tests/dne_serve/wire/test_limits.py."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import cycle
from urllib.parse import urlsplit

import pytest

from tests.abuse.victim import Client, Victim
from tests.campaigns import AddRow
from tests.live_server import png

SLOW = 500
ASKED = 400
DRIP_S = 1.0
POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
BEGINNINGS = (
    b"",
    b"GET /versions HTTP/1.1\r\nHost: localhost\r\nX: ",
    POST + b"Content-Length: 1000000\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n",
)


async def drip(victim: Victim, beginning: bytes, *, ended: asyncio.Event) -> None:
    """Sends a byte a second, and comes again when it is shown out."""
    address = urlsplit(victim.url)
    while not ended.is_set():
        with suppress(OSError):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(beginning)
            with suppress(OSError):
                while not ended.is_set() and not writer.is_closing():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(DRIP_S)
            writer.close()


def asked(victim: Victim) -> list[float]:
    """How long each of many usual requests takes, sorted."""
    with Client(victim) as client:
        answers = [client.predict(png(seed % 50)) for seed in range(ASKED)]
    assert {answer.status for answer in answers} == {200}
    return sorted(answer.seconds for answer in answers)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_slow_connections(victim: Victim, abuse_row: AddRow) -> None:
    asked(victim)
    before, memory = asked(victim), victim.resident_bytes()

    async def among_slow_ones() -> list[float]:
        ended = asyncio.Event()
        beginnings = cycle(BEGINNINGS)
        slow = [
            asyncio.create_task(drip(victim, next(beginnings), ended=ended)) for _ in range(SLOW)
        ]
        await asyncio.sleep(3)
        taken: list[float] = []
        end = time.monotonic() + 25  # past the time that headers get
        while time.monotonic() < end:
            taken += await asyncio.to_thread(asked, victim)
        ended.set()
        await asyncio.gather(*slow)
        return sorted(taken)

    during = asyncio.run(among_slow_ones())
    grown = victim.resident_bytes() - memory
    median, usual = during[len(during) // 2], before[len(before) // 2]
    p99 = during[int(len(during) * 0.99)]
    assert median < 2 * usual
    assert p99 < max(0.25, 5 * before[int(len(before) * 0.99)])
    assert grown < 100 << 20
    abuse_row(
        f"{SLOW} slow connections",
        "silent, dripping headers, bodies and chunks, for 28 s",
        f"{len(during):,} usual requests all answered; median {1000 * median:.1f} ms (before: "
        f"{1000 * usual:.1f}), p99 {1000 * p99:.0f} ms; memory +{grown / 2**20:.0f} MiB",
    )
