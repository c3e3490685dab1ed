"""Hundreds of swaps under traffic: memory, file handles and threads stay where they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dne_serve.engines.torch_engine import TorchEngine
from model_store.records.manifest import Manifest, total_bytes
from model_store.store.store import Store
from tests.e2e.test_swaps import PAUSE_S, Traffic
from tests.live_server import Live, live_server, wait_for
from tests.tiny_versions import promote, publish_tiny

SETTLED = 10
"""Swaps after which caches are warm and pools are full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What the process holds."""

    resident_kib: int
    files: int
    threads: int
    expert_bytes: int

    @classmethod
    def now(cls, engine: TorchEngine) -> Use:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return cls(
            resident_kib=int(status["VmRSS"].split()[0]),
            files=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            expert_bytes=engine.bank.bytes,
        )


def swap(live: Live, store: Store, number: int, trunk: list[Manifest]) -> None:
    """A new branch from one of three versions, with one or two heads; or back to a version."""
    if number % 3 == 2:
        target = trunk[number % len(trunk)]
        promote(store, target)
        live.wait_until_serving(target.version)
        return
    tasks = [(f"side{number}", [f"s{number}", f"t{number}"])]
    parent = trunk[number % len(trunk)]
    branch = publish_tiny(store, tasks=tasks, parent=parent, seed=number, heads=1 + number % 2)
    promote(store, branch)
    live.wait_until_serving(branch.version)


@contextmanager
def traffic_to(live: Live) -> Iterator[Traffic]:
    traffic = Traffic(live.url)
    client = threading.Thread(target=traffic.run, kwargs={"pause_s": PAUSE_S})
    client.start()
    try:
        yield traffic
    finally:
        traffic.stop.set()
        client.join()


def settled(live: Live, store: Store, target: Manifest, engine: TorchEngine) -> Use:
    """What is in use when `target` is served, and all others have left."""
    promote(store, target)
    live.wait_until_serving(target.version)
    wait_for(lambda: live.metric("dne_resident_versions") == 1)
    wait_for(lambda: engine.bank.experts == len(target.tasks))
    return Use.now(engine)


@pytest.mark.long
@pytest.mark.parametrize(
    "swaps",
    [
        pytest.param(40, id="short"),
        pytest.param(300, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_swaps_leave_nothing_behind(tmp_path: Path, swaps: int) -> None:
    store = Store.create(str(tmp_path / "models"))
    trunk: list[Manifest] = []
    for number in range(3):
        parent = trunk[-1] if trunk else None
        tasks = [(f"t{number}", [f"c{number}", f"d{number}"])]
        trunk.append(publish_tiny(store, tasks=tasks, parent=parent, seed=number))
    promote(store, trunk[-1])
    engine = TorchEngine(device="cpu", threads=1, max_batch=8)
    with live_server(tmp_path / "models", engine=engine, max_resident=2, idle_seconds=0.05) as live:
        live.wait_until_ready()
        with traffic_to(live) as traffic:
            for number in range(SETTLED):
                swap(live, store, number, trunk)
            before = settled(live, store, trunk[-1], engine)
            for number in range(SETTLED, swaps):
                swap(live, store, number, trunk)
            after = settled(live, store, trunk[-1], engine)
            # A connection that is being closed is no leak: that would stay.
            wait_for(lambda: Use.now(engine).files <= before.files + 2)
    assert traffic.failed == []
    assert len(traffic.answered) >= swaps
    assert after.resident_kib <= 1.05 * before.resident_kib
    assert after.threads == before.threads
    # With the room that stacks keep.
    assert after.expert_bytes <= 2 * total_bytes(trunk[-1].model_shards)
