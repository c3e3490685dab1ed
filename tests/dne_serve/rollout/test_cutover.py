"""Servers switch together: at the time in the channel's record plus `--settle-seconds`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dne_serve.rollout.cutover import MAX_WAITING, age_s
from dne_serve.rollout.loaded_versions import LoadedVersions
from dne_serve.rollout.reloader import Reloader
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock, FakeEngine
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import publish_tiny

SETTLE_S = 10.0
DAY_S = 86_400.0


class Machine:
    """One replica: the clock on its wall may be wrong by `off` seconds."""

    def __init__(
        self, store: Store, loaded: LoadedVersions, clock: Clock, *, off: float = 0
    ) -> None:
        self.clock, self.loaded, self._store = clock, loaded, store
        self._began, self.off = time.time(), off
        self.reloader = Reloader(
            lambda: store,
            loaded=loaded,
            channel="production",
            poll_s=1.0,
            settle_s=SETTLE_S,
            clock=clock,
            wall=lambda: self.head_time + self.clock.now + self.off,
        )
        self.head_time = self._began + DAY_S  # all that is there was written long ago

    @property
    def served(self) -> int | None:
        return self.loaded.served.version if self.loaded.served else None

    @property
    def waits(self) -> int | None:
        newest = self.reloader.cutover.newest
        return newest.target if newest else None

    def new_record(self, record: ChannelRecord, *, at: float) -> None:
        """Make it `at` seconds past the writing of this record, and poll."""
        self.head_time = -age_s(record, now=0.0)
        self.at(at)

    def at(self, now: float) -> None:
        self.clock.now = now
        self.reloader.cutover.switch()
        self.reloader.poll()


@pytest.fixture
def machine(store: Store, digits: Manifest, loaded: LoadedVersions, clock: Clock) -> Machine:
    made = Machine(store, loaded, clock)
    made.reloader.poll()
    return made


@pytest.fixture
def third(store: Store, digits: Manifest) -> Manifest:
    return publish_tiny(store, tasks=[("signs", ["+"])], parent=digits, seed=3)


def promote(store: Store, to: int) -> ChannelRecord:
    return store.promote(to, channel="production", actor="tests", reason="")


def rollback(store: Store, to: int) -> ChannelRecord:
    return store.rollback(channel="production", to=to, actor="tests", reason="")


def test_an_old_record_is_served_at_once_at_the_start(machine: Machine) -> None:
    assert (machine.served, machine.waits) == (2, None)


def test_a_version_is_loaded_early_and_served_at_the_moment_of_its_record(
    machine: Machine, store: Store, third: Manifest, engine: FakeEngine
) -> None:
    machine.new_record(promote(store, 3), at=0.5)
    assert (machine.served, machine.waits, engine.loaded[-1]) == (2, 3, 3)
    machine.at(9.99)
    assert machine.served == 2
    machine.at(10.0)
    assert (machine.served, machine.waits) == (3, None)
    assert machine.reloader.record == store.head("production")


def test_all_machines_switch_at_one_moment_whenever_they_polled(
    machine: Machine, store: Store, third: Manifest
) -> None:
    record = promote(store, 3)
    moments = []
    for seen_at in (0.1, 3.0, 9.9):
        settling = machine.reloader.cutover
        machine.new_record(record, at=seen_at)
        moments.append(seen_at + settling.wait_s(record))
    assert moments == pytest.approx([10.0, 10.0, 10.0])


@pytest.mark.parametrize(("off", "waits_s"), [(2, 7), (-2, 10), (-DAY_S, 10), (DAY_S, 0)])
def test_a_wrong_clock_never_delays_a_version_by_more_than_the_setting(
    machine: Machine, store: Store, third: Manifest, off: float, waits_s: float
) -> None:
    machine.off = off
    record = promote(store, 3)
    machine.new_record(record, at=1.0)
    assert machine.served == (2 if waits_s else 3)
    machine.at(1.0 + waits_s)
    assert machine.served == 3


def test_a_version_that_comes_late_is_served_at_once_and_the_log_says_so(
    machine: Machine, store: Store, third: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    machine.new_record(promote(store, 3), at=12.5)
    assert machine.served == 3
    assert "ready 2.5 s after its moment" in caplog.text


def test_a_rollback_does_not_wait_and_ends_the_waiting(
    machine: Machine, store: Store, third: Manifest
) -> None:
    machine.new_record(promote(store, 3), at=1.0)
    rollback(store, 1)
    machine.at(2.0)
    assert (machine.served, machine.waits) == (1, None)
    machine.at(30.0)
    assert machine.served == 1


def test_two_releases_close_together_each_have_their_moment(
    machine: Machine, store: Store, third: Manifest
) -> None:
    """Else a machine that polls after the first moment would differ from one that polls before."""
    machine.new_record(promote(store, 3), at=0.0)
    later = promote(store, 1)
    machine.clock.now = 4.0
    machine.head_time = -age_s(later, now=0.0) - 4.0
    machine.reloader.poll()
    assert (machine.served, machine.waits) == (2, 1)
    machine.at(10.0)
    assert (machine.served, machine.waits) == (3, 1)
    machine.at(14.0)
    assert (machine.served, machine.waits) == (1, None)


def test_what_waits_stays_in_memory_and_is_bounded(
    machine: Machine, store: Store, third: Manifest, loaded: LoadedVersions
) -> None:
    machine.new_record(promote(store, 3), at=0.0)
    other = publish_tiny(store, tasks=[("other", ["x"])], seed=4)
    for version in (1, other.version):
        loaded.load(store.read_manifest(version), shards=store)
    machine.clock.now = 9.0
    loaded.sweep()
    assert loaded.find(third.digest) is not None
    for number in range(2 * MAX_WAITING):
        machine.new_record(promote(store, 1 + number % 3), at=9.0 + number / 100)
    assert len(machine.reloader.cutover._waiting) == MAX_WAITING


def test_a_machine_that_starts_before_the_moment_serves_as_the_others_do(
    store: Store, digits: Manifest, third: Manifest, loaded: LoadedVersions, clock: Clock
) -> None:
    machine = Machine(store, loaded, clock)
    rollback(store, 1)
    machine.new_record(promote(store, 3), at=4.0)
    assert (machine.served, machine.waits) == (1, 3)
    machine.at(10.0)
    assert machine.served == 3


def test_the_first_version_of_a_store_is_served_at_once(
    store: Store, letters: Manifest, loaded: LoadedVersions, clock: Clock
) -> None:
    machine = Machine(store, loaded, clock)
    head = store.head("production")
    assert head is not None
    machine.new_record(head, at=0.0)
    assert (machine.served, machine.waits) == (1, None)


def test_unloading_ends_the_waiting(machine: Machine, store: Store, third: Manifest) -> None:
    machine.new_record(promote(store, 3), at=1.0)
    machine.reloader.withdraw()
    machine.at(11.0)
    assert (machine.served, machine.waits) == (None, None)


@pytest.mark.parametrize("text", ["2026-99-99T99:99:99Z", "0000-01-01T00:00:00.5Z"])
def test_a_time_that_no_calendar_has_is_long_ago(
    store: Store, letters: Manifest, text: str
) -> None:
    head = store.head("production")
    assert head is not None
    assert age_s(head.model_copy(update={"time": text}), now=time.time()) > DAY_S


@pytest.mark.long
def test_two_servers_switch_together_and_promote_answers_then(
    store: Store, digits: Manifest
) -> None:
    folder = Path(store.location)
    with (
        live_server(folder, settle_seconds=1.0) as one,
        live_server(folder, settle_seconds=1.0, poll_seconds=0.4) as other,
    ):
        one.wait_until_ready()
        other.wait_until_ready()
        switched: dict[str, float] = {}
        watching = [
            threading.Thread(target=note_switch, args=(live, switched)) for live in (one, other)
        ]
        for thread in watching:
            thread.start()
        promoting = threading.Thread(target=lambda: one.admin("/promote", to=1))
        promoting.start()
        wait_for(lambda: ready(other)["settling"] == 1)
        assert (ready(one)["version"], ready(other)["version"]) == (2, 2)
        for thread in (*watching, promoting):
            thread.join()
        head = store.head("production")
        assert head is not None
        moments = [at - (-age_s(head, now=0.0)) for at in switched.values()]
        assert all(0.99 <= moment < 1.3 for moment in moments), moments
        assert one.admin("/rollback", to=2).json()["version"] == 2
        assert ready(one)["settling"] is None


def test_promote_answers_at_the_moment_and_a_rollback_passes_it(live_settling: Live) -> None:
    live, answers = live_settling, list[int]()

    def promote_by_http() -> None:
        answers.append(live.admin("/promote", to=1).json()["version"])

    begun = [threading.Thread(target=promote_by_http) for _ in range(3)]
    settling = live.serving.reloader.cutover
    for one in begun:
        before = len(settling._waiting)
        one.start()  # one after the other: of two moves at a time one is refused
        wait_for(lambda: len(settling._waiting) > before)  # noqa: B023 – called in this turn
    began = time.monotonic()
    assert live.admin("/rollback", to=2).status_code == 200
    for one in begun:
        one.join()
    assert time.monotonic() - began < 10
    assert answers == [2, 2, 2]  # what is served then, as the channel has moved on
    assert live.predict(png()).json()["version"] == 2


@pytest.fixture
def live_settling(store: Store, digits: Manifest) -> Iterator[Live]:
    with live_server(Path(store.location), settle_seconds=60) as live:
        live.wait_until_ready()
        yield live


def ready(live: Live) -> dict[str, object]:
    answer: dict[str, object] = live.http.get("/readyz").json()
    return answer


def note_switch(live: Live, switched: dict[str, float]) -> None:
    loaded = live.serving.loaded
    wait_for(lambda: loaded.served is not None and loaded.served.version == 1)
    switched[live.url] = time.time()
