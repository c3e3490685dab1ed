"""What following a channel asks of the store: one request a poll, however long the history."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from dne_serve.rollout.channel import SameStore
from dne_serve.rollout.loaded_versions import LoadedVersions
from dne_serve.rollout.reloader import NEXT_POLLS, Reloader
from model_store.backends.base import Entry
from model_store.errors import StoreError
from model_store.layout import record_name
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.model_store.backends import MemoryObjects
from tests.tiny_versions import promote, publish_tiny

PAGE = 10
"""Names that one request lists here: a bucket has pages of 1,000."""


class Counting(MemoryObjects):
    """Objects that count the requests, and fail them all if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.down = False

    def _count(self) -> None:
        self.requests += 1
        if self.down:
            raise StoreError("the network is down")

    def read(self, name: str, *, max_bytes: int) -> bytes:
        self._count()
        return super().read(name, max_bytes=max_bytes)

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        found = super().list(folder, after=after)
        for _ in range(max(1, math.ceil(len(found) / PAGE))):
            self._count()
        return found


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """A bucket in memory, which is what any location means."""
    made = Counting()
    monkeypatch.setattr("model_store.store.store.objects_at", lambda location: made)
    return made


@pytest.fixture
def counted(objects: Counting) -> Store:
    return Store.create("memory", objects=objects)


@pytest.fixture
def first(counted: Store) -> Manifest:
    made = publish_tiny(counted, tasks=[("letters", ["a", "b"])])
    promote(counted, made)
    return made


@pytest.fixture
def reloader(first: Manifest, loaded: LoadedVersions) -> Reloader:
    made = Reloader(SameStore("memory"), loaded=loaded, channel="production", poll_s=1.0)
    made.poll()
    return made


def polled(reloader: Reloader, objects: Counting, *, times: int) -> float:
    """Requests of a poll, on average."""
    before = objects.requests
    for _ in range(times):
        reloader.poll()
    return (objects.requests - before) / times


@pytest.mark.parametrize("records", [0, 40])
def test_a_poll_takes_one_request_while_nothing_changes(
    counted: Store, first: Manifest, reloader: Reloader, objects: Counting, records: int
) -> None:
    for _ in range(records):
        promote(counted, first)
    reloader.poll()
    assert 1 <= polled(reloader, objects, times=10 * (NEXT_POLLS + 1)) <= 1.1


def test_a_channel_that_lost_its_newest_records_is_noticed_by_a_look(
    counted: Store, first: Manifest, reloader: Reloader, objects: Counting
) -> None:
    for _ in range(PAGE):
        promote(counted, first)
    reloader.poll()
    for number in range(3, PAGE + 2):
        objects.delete(record_name("production", number))
    polled(reloader, objects, times=NEXT_POLLS + 1)
    assert reloader.failure is not None
    assert "went back to record 2" in str(reloader.failure.error)


def test_every_record_is_seen_by_the_next_poll(
    counted: Store, first: Manifest, reloader: Reloader, loaded: LoadedVersions
) -> None:
    second = publish_tiny(counted, tasks=[("digits", ["0"])], parent=first)
    for to in (second, first, second, first):
        promote(counted, to)
        reloader.poll()
        assert loaded.served is not None
        assert loaded.served.version == to.version
        assert reloader.failure is None


def test_a_store_that_cannot_be_reached_is_told_at_once_and_served_from_memory(
    reloader: Reloader, loaded: LoadedVersions, objects: Counting
) -> None:
    objects.down = True
    reloader.poll()
    assert reloader.failure is not None
    assert loaded.served is not None
    objects.down = False
    reloader.poll()
    assert reloader.failure is None
