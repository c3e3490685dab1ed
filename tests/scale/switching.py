"""Watch from outside when each server of a fleet switches to the version of a channel record."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from dne_serve.rollout.cutover import age_s
from model_store.records.channel import ChannelRecord
from tests.live_server import wait_for
from tests.scale.fleet import url_of

LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Switch:
    """Seconds after a record was written, one for each server."""

    after_s: tuple[float, ...]

    @property
    def mixed_s(self) -> float:
        """The time for which servers answered by different versions."""
        return max(self.after_s) - min(self.after_s)


@dataclass
class Watch:
    """The moment at which each server was first seen to serve each record."""

    ports: Sequence[int]
    moments: dict[tuple[int, int], float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def look(self, port: int) -> None:
        with httpx.Client(base_url=url_of(port), timeout=30) as client:
            while not self.over.wait(LOOK_S):
                record = client.get("/readyz").json().get("record")
                self.moments.setdefault((port, record), time.time())

    def switch_to(self, record: ChannelRecord) -> Switch:
        """Wait until all servers serve the record."""
        keys = [(port, record.number) for port in self.ports]
        wait_for(lambda: all(key in self.moments for key in keys), seconds=60)
        return Switch(tuple(age_s(record, now=self.moments[key]) for key in keys))


@contextmanager
def watching(ports: Sequence[int]) -> Iterator[Watch]:
    watch = Watch(ports)
    threads = [threading.Thread(target=watch.look, args=(port,)) for port in ports]
    for one in threads:
        one.start()
    try:
        yield watch
    finally:
        watch.over.set()
        for one in threads:
            one.join()
