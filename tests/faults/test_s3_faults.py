"""What object storage does to a store: races, lost and wrong replies, a server that dies."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model_store.store.store import Store
from tests.campaigns import AddRow
from tests.model_store.drafts import prepare, publish_lineage
from tests.s3_proxy import Fault, Proxy, Request, proxy_before
from tests.s3_server import BUCKET, S3, SeaweedFS, reach

FAULTS: tuple[Fault, ...] = ("lose request", "lose reply", "409", "409 late", "503", "503 late")
MOVE: dict[str, Any] = {"channel": "production", "actor": "a@b", "reason": ""}


@dataclass(frozen=True, slots=True)
class Told:
    """What the publishers were told, by transaction."""

    acknowledged: Mapping[str, int]
    unknown: frozenset[str]
    failed: frozenset[str]


def start_publishers(location: str, *, processes: int, count: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.racing_publisher"),
                *(location, f"p{number}", str(count)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in range(processes)
    ]


def hear(publishers: list[subprocess.Popen[str]]) -> Told:
    lines = []
    for publisher in publishers:
        told, _ = publisher.communicate()
        assert publisher.returncode == 0
        lines += [json.loads(line) for line in told.splitlines()]
    return Told(
        acknowledged={line["transaction"]: line["version"] for line in lines if "version" in line},
        unknown=frozenset(line["transaction"] for line in lines if line.get("unknown")),
        failed=frozenset(line["transaction"] for line in lines if line.get("unknown") is False),
    )


def check_told(store: Store, told: Told) -> None:
    """Every acknowledged version is there, once, as it was told; what failed is not there."""
    there = {store.manifest(version).transaction: version for version in store.versions()}
    assert len(there) == len(store.versions()), "a publish was done twice"
    assert {transaction: there.get(transaction) for transaction in told.acknowledged} == (
        told.acknowledged
    )
    assert not told.failed & there.keys()
    first = store.manifest(1).transaction
    assert there.keys() - told.acknowledged.keys() - {first} <= told.unknown
    assert store.versions() == list(range(1, len(there) + 1))
    assert store.verify().problems == ()


def race(location: str, *, processes: int, count: int) -> Store:
    store = Store.create(location)
    publish_lineage(store, 1)
    told = hear(start_publishers(location, processes=processes, count=count))
    check_told(store, told)
    assert len(told.acknowledged) == processes * count
    assert told.unknown == told.failed == frozenset()
    return store


def test_racing_publishers_on_object_storage_lose_nothing(s3_location: str) -> None:
    assert len(race(s3_location, processes=3, count=3).versions()) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_publish_to_object_storage(s3_location: str, fault_row: AddRow) -> None:
    store = race(s3_location, processes=8, count=25)
    published = len(store.versions()) - 1
    assert published == 200
    fault_row(
        "8 processes × 25 publishes",
        "SeaweedFS",
        f"{published} versions, contiguous, none lost",
    )


@pytest.fixture
def proxy(seaweedfs: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    with proxy_before(seaweedfs.endpoint) as running:
        reach(S3(running.endpoint), monkeypatch, tmp_path)
        yield running


def write_faults(share: float, *, seed: int) -> Any:
    """That share of all writes goes wrong, in one of the ways."""
    chance = random.Random(seed)

    def plan(request: Request) -> Fault:
        hit = request.writes and "store.json" not in request.path and chance.random() < share
        return chance.choice(FAULTS) if hit else "none"

    return plan


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lost_replies_and_wrong_answers_make_no_duplicate_and_no_false_conflict(
    seaweedfs: S3, proxy: Proxy, fault_row: AddRow, tmp_path: Path
) -> None:
    location = f"s3://{BUCKET}/{tmp_path.name.lower()}-{time.time_ns()}"
    store = Store.create(location)
    publish_lineage(store, 1)
    proxy.plan = write_faults(0.3, seed=1)
    # One publisher: whatever is not taken at the first attempt would be a false conflict.
    for number in range(2, 42):
        manifest = prepare(parent=store.manifest(1), task=f"t{number}", images=1, seed=number)
        assert manifest.publish(store).version == number
        store.promote(number, **MOVE)
    assert [record.target for record in store.history("production")] == list(range(1, 42))
    # And several, who meet each other as well.
    told = hear(start_publishers(location, processes=4, count=10))
    faults = Counter(proxy.faults())
    proxy.plan = lambda request: "none"
    assert len(told.acknowledged) == 40
    assert told.unknown == told.failed == frozenset()
    transactions = [store.manifest(version).transaction for version in store.versions()]
    assert len(set(transactions)) == len(transactions) == 81
    assert store.verify().problems == ()
    assert set(faults) == set(FAULTS)
    fault_row(
        "lost replies, 409, 503",
        f"proxy before SeaweedFS, {faults.total()} faults in 80 publishes and 40 promotions",
        "0 duplicates, 0 false conflicts",
    )


def kill_in_the_middle(location: str, server: SeaweedFS, *, kills: int, publishers: int) -> Told:
    """Publishers go on through as many deaths of the server; what they were told holds."""
    store = Store.create(location)
    publish_lineage(store, 1)
    count = 10 * (kills + 1)
    running = start_publishers(location, processes=publishers, count=count)
    for _ in range(kills):
        wait_for_versions(store, len(store.versions()) + 3 * publishers)
        server.kill()
        server.start()
    told = hear(running)
    check_told(store, told)
    assert len(told.acknowledged) == publishers * count
    prepare(parent=store.manifest(1), task="again", images=1, seed=1).publish(store)
    return told


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, SeaweedFS]]:
    """A place on a server of its own."""
    server = SeaweedFS(tmp_path / "weed")
    try:
        server.start()
        yield reach(server.s3, monkeypatch, tmp_path), server
    finally:
        server.stop()


@pytest.mark.long
def test_a_server_that_dies_once_keeps_what_it_acknowledged(
    mortal: tuple[str, SeaweedFS],
) -> None:
    kill_in_the_middle(*mortal, kills=1, publishers=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_dies_in_the_middle_of_publishes_keeps_what_it_acknowledged(
    mortal: tuple[str, SeaweedFS], fault_row: AddRow
) -> None:
    kills = 10
    told = kill_in_the_middle(*mortal, kills=kills, publishers=3)
    fault_row(
        "SeaweedFS killed in the middle of publishes",
        f"SIGKILL {kills} times, 3 publishers",
        f"{len(told.acknowledged)} acknowledged versions intact "
        f"({len(told.failed)} failed, {len(told.unknown)} unknown were told)",
    )


def wait_for_versions(store: Store, count: int) -> None:
    end = time.monotonic() + 60
    while len(store.versions()) < count:
        assert time.monotonic() < end, "the publishers do not get on"
        time.sleep(0.02)
