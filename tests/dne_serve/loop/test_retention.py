"""Retention under clocks that are wrong: the server's, the store's, and both."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo

import pytest

from dne_serve.loop.inbox_handle import SWEEP_S, Retention
from model_store.loop.inbox import Inbox
from model_store.loop.index import Index
from tests.model_store.backends import ClockedObjects
from tests.model_store.loop.items import add_item

YEAR = timedelta(days=365)
DAYS = 30.0


class Bench:
    """An inbox of some items, all collected now, and the sweeps of a server."""

    def __init__(self, items: int) -> None:
        self.objects = ClockedObjects(datetime.now(UTC).timestamp())
        self.inbox = Inbox(self.objects)
        for number in range(items):
            add_item(self.inbox, f"photo {number}", since=datetime.now(UTC))
        self.now = 0.0
        self.start()

    def start(self) -> None:
        self.retention = Retention(days=DAYS, clock=lambda: self.now)

    def sweep(self) -> int:
        """Sweep an hour later, and count the items that are left."""
        self.now += SWEEP_S
        index = Index(self.inbox)
        index.refresh(whole=True)
        self.retention.sweep(self.inbox, index)
        return len(list(self.objects.list_names("inbox/pictures")))


def test_a_server_a_year_ahead_deletes_nothing_of_a_store_with_the_right_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Bench(20)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return super().now(tz) + YEAR

    monkeypatch.setattr("dne_serve.loop.inbox_handle.datetime", Ahead)
    assert [one.sweep() for _ in range(3)] == [20, 20, 20]
    assert caplog.text == ""


def test_a_store_a_year_ahead_loses_no_large_share_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Bench(20)
    one.objects.now_s += YEAR.total_seconds()
    for _ in range(3):  # a server that is started again and again deletes nothing
        one.start()
        assert one.sweep() == 20
    assert "20 of 20 items of the inbox are overdue at once" in caplog.text
    assert [one.sweep() for _ in range(3)] == [18, 16, 14]
    one.objects.now_s -= YEAR.total_seconds()
    assert one.sweep() == 14


def test_a_small_share_goes_at_once_and_a_large_one_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Bench(3)
    one.objects.now_s += 2 * DAYS * 86400
    for number in range(30):
        add_item(one.inbox, f"young {number}", since=datetime.now(UTC) + timedelta(days=2 * DAYS))
    assert one.sweep() == 30
    assert "are overdue" not in caplog.text
    one.objects.now_s += 2 * DAYS * 86400
    assert [one.sweep() for _ in range(40)][-1] == 0
