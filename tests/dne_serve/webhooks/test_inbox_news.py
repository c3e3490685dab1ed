"""An inbox that fills is told once, and again only after it has been emptied."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dne_serve.settings import load_settings
from dne_serve.webhooks.events import LOOK_S, Event, InboxNews
from model_store.errors import WrongUsage
from model_store.loop.inbox import DISCARD, Inbox
from model_store.loop.index import Index
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.fake_engine import Clock
from tests.dne_serve.receiver import receiving
from tests.live_server import live_server, wait_for
from tests.model_store.backends import MemoryObjects
from tests.model_store.loop.items import add_item

BOUND = 4


class Filling:
    """An inbox, and a server that looks at it."""

    def __init__(self) -> None:
        self.inbox = Inbox(MemoryObjects())
        self.clock = Clock()
        self.events: list[Event] = []
        self.added = 0
        self.news = self.restarted()

    def restarted(self) -> InboxNews:
        index = Index(self.inbox, clock=self.clock)
        return InboxNews(
            lambda: index,
            bound=BOUND,
            announce=self.events.append,
            recent_s=600,
            clock=self.clock,
        )

    def add(self, count: int, *, age_s: float = 0.0) -> list[str]:
        return [self._add_one(age_s, f"{place}") for place in range(count)]

    def _add_one(self, age_s: float, content: str) -> str:
        """Each a millisecond after the one before it: ids of one millisecond have no order."""
        self.added += 1
        since = datetime.now(UTC) + timedelta(seconds=-age_s, milliseconds=self.added)
        return add_item(self.inbox, content, since=since)

    def discard(self, items: list[str]) -> None:
        for item in items:
            self.inbox.judge(item, DISCARD, actor="ada")

    def told(self, *, after_s: float = LOOK_S) -> list[Event]:
        self.clock.now += after_s
        self.events.clear()
        self.news.look(store_id="4f0c")
        return [*self.events]


@pytest.fixture
def filling() -> Filling:
    return Filling()


def test_the_picture_that_reaches_the_number_is_told_with_what_waits(filling: Filling) -> None:
    filling.add(BOUND - 1)
    assert filling.told() == []
    filling.add(3)
    [event] = filling.told()
    assert event.type == "dne.inbox.filled"
    assert event.data == {"waiting": BOUND + 2, "bound": BOUND}
    assert filling.told() == []


def test_all_servers_give_the_event_one_id(filling: Filling) -> None:
    """Each looks at its own moment, when more may wait."""
    filling.told()
    filling.add(BOUND)
    [first] = filling.told()
    filling.add(1)
    filling.news = filling.restarted()
    [again] = filling.told()
    assert (again.source, again.id) == (first.source, first.id)
    assert again.data["waiting"] == BOUND + 1


def test_labels_around_the_number_tell_nothing_until_half_of_it_is_gone(filling: Filling) -> None:
    filling.told()
    first = filling.add(BOUND)
    [event] = filling.told()
    filling.discard(first[:2])
    assert filling.told() == []
    second = filling.add(2)
    assert filling.told() == []
    filling.discard([*first[2:], second[0]])
    assert filling.told() == []
    filling.add(BOUND)
    [later] = filling.told()
    assert later.id != event.id


def test_a_restarted_server_does_not_tell_of_last_week(filling: Filling) -> None:
    filling.add(BOUND, age_s=7 * 24 * 3600)
    assert filling.told() == []
    filling.add(1)
    assert filling.told() == []


def test_between_looks_nothing_is_asked_of_the_store(filling: Filling) -> None:
    filling.told()
    filling.add(BOUND)
    assert filling.told(after_s=LOOK_S - 1) == []
    assert len(filling.told(after_s=1)) == 1


def test_a_server_posts_it(store: Store, digits: Manifest) -> None:
    inbox = Inbox(store.objects)
    for place in range(2):
        add_item(inbox, f"{place}", since=datetime.now(UTC))
    with (
        receiving() as receiver,
        live_server(store.location, webhook=f"{receiver.url},inbox=2") as live,
    ):
        live.wait_until_ready()
        wait_for(lambda: "dne.inbox.filled" in [post.event["type"] for post in receiver.posts])


def test_a_number_without_a_url_is_refused() -> None:
    with pytest.raises(WrongUsage, match="webhook names no URL"):
        load_settings(store="models", webhook="inbox=2")
