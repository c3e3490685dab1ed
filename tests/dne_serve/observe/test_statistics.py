from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dne_serve.engines.batcher import Ticket
from dne_serve.observe.metrics import Statistics, VersionStatistics
from tests.dne_serve.observe.made_up import answered, failed, logits, resident


@dataclass(frozen=True)
class FakeResident:
    version: int


@dataclass(frozen=True)
class FakeQuery:
    residents: tuple[FakeResident, ...]


def ticket(version: int, *, arrived_ns: int) -> Ticket[Any, Any, int]:
    """Batched under a wider version than the one that answers."""
    query = FakeQuery((FakeResident(version), FakeResident(9)))
    return Ticket(key=FakeResident(9), item=query, arrived_ns=arrived_ns)


def test_a_version_that_nobody_asked_for_has_done_nothing() -> None:
    statistics = Statistics()
    assert statistics.of(7) == VersionStatistics()
    assert statistics.versions == []


def test_requests_are_counted_by_how_they_end() -> None:
    statistics = Statistics()
    statistics.answered(answered(resident(1), *[logits(1, 0, 0)] * 3))
    statistics.answered(failed(resident(1), ValueError("full"), images=5, decoded=False))
    found = statistics.of(1)
    assert (found.success.count, found.fail.count, found.decode.count) == (1, 1, 1)
    assert found.images == 3
    assert (found.decode.ns, found.success.ns, found.fail.ns) == (40, 100, 100)


def test_a_batch_of_two_versions_is_counted_for_each() -> None:
    statistics = Statistics()
    batch = [ticket(1, arrived_ns=0), ticket(2, arrived_ns=20), ticket(1, arrived_ns=60)]
    statistics.ran(batch, 100, 107)
    first, second = statistics.of(1), statistics.of(2)
    assert (first.queue.count, first.queue.ns) == (2, 140)
    assert (second.queue.count, second.queue.ns) == (1, 80)
    assert (first.run.count, first.run.ns) == (2, 14)
    assert {size: batch.ns for size, batch in first.batches.items()} == {2: 7}
    assert {size: batch.ns for size, batch in second.batches.items()} == {1: 7}
    assert statistics.versions == [1, 2]


def test_what_was_read_does_not_change_any_more() -> None:
    statistics = Statistics()
    statistics.ran([ticket(1, arrived_ns=0)], 1, 2)
    before = statistics.of(1)
    statistics.ran([ticket(1, arrived_ns=0)], 1, 2)
    assert (before.run.count, before.batches[1].count) == (1, 1)


def test_no_count_is_lost_among_threads() -> None:
    statistics = Statistics()

    def ask(index: int) -> None:
        statistics.answered(answered(resident(index % 2), *[logits(1, 0, 0)] * 2))
        statistics.ran([ticket(index % 2, arrived_ns=0)], 1, 2)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(400)))
    for version in (0, 1):
        found = statistics.of(version)
        assert (found.success.count, found.images, found.run.count) == (200, 400, 200)
