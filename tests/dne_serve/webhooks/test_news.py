"""Moves of a channel, refused versions and failed loads become events, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dne_serve.webhooks import events as events_module
from dne_serve.webhooks.events import GUARD, ChannelNews, Event, NotLoaded
from model_store.errors import StoreError
from model_store.layout import record_name, version_name
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Manifest
from model_store.records.quality import Gate
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock
from tests.tiny_versions import promote, publish_tiny

EVERY_S = 10.0
REFUSED = Gate(passed=False, reasons=("old classes fell from 91.0 % to 84.0 %",))


class Watched:
    """A store, and the news of its production channel as a server would see them."""

    def __init__(self, store: Store, *, channel: str = "production") -> None:
        self.store = store
        self.channel = channel
        self.clock = Clock()
        self.failed: NotLoaded | None = None
        self.faults: list[Exception] = []
        self.opened = 0
        self.events: list[Event] = []
        self.news = self.restarted()

    def restarted(self) -> ChannelNews:
        """The news of a server that has just started."""
        return ChannelNews(
            self.open,
            head=lambda: self.store.head(self.channel),
            failed=lambda: self.failed,
            announce=self.events.append,
            tick_s=0.01,
            look_every_s=EVERY_S,
            clock=self.clock,
        )

    def open(self) -> Store:
        self.opened += 1
        if self.faults:
            raise self.faults.pop(0)
        return self.store

    def told(self, *, after_s: float = 0.0) -> list[Event]:
        """The events of the next look."""
        self.clock.now += after_s
        self.events.clear()
        self.news.look()
        return [*self.events]


@pytest.fixture
def watched(store: Store, digits: Manifest) -> Watched:
    """Versions 1 and 2 are promoted, and were told."""
    watched = Watched(store)
    watched.news.look()
    return watched


def roll_back(store: Store, *, actor: str = "ada") -> ChannelRecord:
    return store.rollback(channel="production", to=None, actor=actor, reason="worse on mugs")


def test_the_event_of_a_rollback_says_all_that_its_record_does(
    store: Store, watched: Watched
) -> None:
    record = roll_back(store)
    [event] = watched.told()
    assert event == Event(
        id=f"{store.id}/channels/production/3",
        type="dne.channel.rolled_back",
        source=f"/stores/{store.id}/channels/production",
        subject="versions/1",
        time=record.time,
        data={
            "channel": "production",
            "version": 1,
            "record": 3,
            "previous": 2,
            "mode": "pin",
            "actor": "ada",
            "reason": "worse on mugs",
        },
    )
    assert watched.told() == []


def test_all_servers_of_a_channel_tell_the_same_event(store: Store, watched: Watched) -> None:
    other = Watched(store)
    other.news.look()
    roll_back(store)
    assert watched.told() == other.told() != []


def test_each_kind_of_move_has_a_type(store: Store, watched: Watched, digits: Manifest) -> None:
    roll_back(store)
    store.resume(channel="production", actor="ada", reason="")
    roll_back(store, actor=f"{GUARD}ada")
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=digits, seed=2))
    types = [event.type.removeprefix("dne.channel.") for event in watched.told()]
    assert types == ["rolled_back", "resumed", "guarded", "promoted"]
    assert [event.data["previous"] for event in watched.events] == [2, 1, 2, 1]


def test_a_resumed_version_is_known_behind_several_rollbacks(
    store: Store, watched: Watched, digits: Manifest
) -> None:
    promote(store, publish_tiny(store, tasks=[("x", ["x"])], parent=digits, seed=2))
    roll_back(store)
    roll_back(store)
    store.resume(channel="production", actor="ada", reason="")
    roll_back(store)
    store.promote(1, channel="production", actor="ada", reason="")
    types = [event.type.removeprefix("dne.channel.") for event in watched.told()]
    assert types == ["promoted", "rolled_back", "rolled_back", "resumed", "rolled_back", "promoted"]


def test_a_restarted_server_tells_recent_records_again_and_no_old_ones(
    store: Store, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [event.id for event in watched.events]
    watched.news = watched.restarted()
    assert [event.id for event in watched.told()] == first
    assert [event.data["version"] for event in watched.events] == [1, 2]
    monkeypatch.setattr(events_module, "RECENT_S", 0.0)
    watched.news = watched.restarted()
    assert watched.told() == []
    roll_back(store)
    assert [event.type for event in watched.told()] == ["dne.channel.rolled_back"]


def test_of_a_long_history_only_the_newest_records_are_read(store: Store, watched: Watched) -> None:
    for _ in range(25):
        store.promote(1, channel="production", actor="ada", reason="")
    events = watched.told()
    assert [event.data["record"] for event in events] == [*range(8, 28)]


def test_a_record_that_cannot_be_read_is_passed_over(store: Store, watched: Watched) -> None:
    broken = roll_back(store)
    store.resume(channel="production", actor="ada", reason="")
    path = Path(store.location, record_name("production", broken.number))
    path.chmod(0o600)
    path.write_bytes(b"{")
    assert [event.data["record"] for event in watched.told()] == [4]


def test_a_channel_that_went_back_tells_nothing_until_it_moves_on(
    store: Store, watched: Watched
) -> None:
    last = roll_back(store)
    watched.told()
    Path(store.location, record_name("production", last.number)).unlink()
    assert watched.told() == []
    store.promote(1, channel="production", actor="ada", reason="")
    assert [event.type for event in watched.told()] == ["dne.channel.promoted"]


def test_a_version_that_the_gate_refused_is_told_at_the_next_listing(
    store: Store, watched: Watched, digits: Manifest
) -> None:
    made = publish_tiny(store, tasks=[("x", ["x"])], parent=digits, seed=2, gate=REFUSED)
    assert watched.told() == []
    assert watched.told(after_s=EVERY_S) == [
        Event(
            id=f"{store.id}/versions/3/refused",
            type="dne.version.refused",
            source=f"/stores/{store.id}",
            subject="versions/3",
            time=made.created,
            data={"version": 3, "parent": 2, "reasons": [*REFUSED.reasons]},
        )
    ]
    assert watched.told(after_s=EVERY_S) == []
    watched.news = watched.restarted()
    assert "dne.version.refused" in [event.type for event in watched.told()]


def test_versions_that_passed_or_were_forced_or_not_judged_are_not_told(
    store: Store, watched: Watched
) -> None:
    for gate in (None, Gate(passed=True), Gate(passed=False, forced=True, reasons=("worse",))):
        publish_tiny(store, gate=gate)
    assert watched.told(after_s=EVERY_S) == []


def test_a_manifest_that_cannot_be_read_does_not_hide_a_refused_one(
    store: Store, watched: Watched
) -> None:
    broken = publish_tiny(store, gate=REFUSED)
    publish_tiny(store, gate=REFUSED)
    path = Path(store.location, version_name(broken.version))
    path.chmod(0o600)
    path.write_bytes(b"{")
    assert [event.data["version"] for event in watched.told(after_s=EVERY_S)] == [4]


def test_between_listings_nothing_is_asked_of_the_store(watched: Watched) -> None:
    opened = watched.opened
    for _ in range(30):
        watched.told()
    assert watched.opened == opened
    watched.told(after_s=EVERY_S)
    assert watched.opened == opened + 1


def test_a_store_that_is_away_delays_the_events(store: Store, watched: Watched) -> None:
    roll_back(store)
    watched.faults = [StoreError("away")]
    assert watched.told() == []
    assert watched.told() == []  # the store gets a rest
    assert [event.type for event in watched.told(after_s=EVERY_S)] == ["dne.channel.rolled_back"]


def test_a_head_that_cannot_be_loaded_is_told_once(store: Store, watched: Watched) -> None:
    head = store.head("production")
    assert head is not None
    watched.failed = NotLoaded(record=head, error="a shard is damaged", serving=1)
    [event] = watched.told()
    assert (event.id, event.type, event.subject) == (
        f"{store.id}/channels/production/2/not_loaded",
        "dne.version.not_loaded",
        "versions/2",
    )
    assert event.data == {
        "channel": "production",
        "version": 2,
        "record": 2,
        "error": "a shard is damaged",
        "serving": 1,
    }
    assert watched.told() == []
