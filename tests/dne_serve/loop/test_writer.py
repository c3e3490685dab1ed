"""The writer alone, on a store in memory: limits, near-duplicates, and a store that refuses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dne_serve.errors import NotKept, Stopped
from dne_serve.loop import writer as writer_module
from dne_serve.loop.inbox_handle import InboxHandle
from dne_serve.loop.writer import FEEDBACK, GivenAnswer, InboxWriter, KeepCandidate, Settled
from dne_serve.setting_values import CollectLimits
from model_store.backends.base import Objects
from model_store.backends.local import LocalDirectory
from model_store.errors import StoreError, WriteFailed
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.item_names import new_id
from model_store.store.store import Store
from tests.dne_serve.loop.photos import Here, encoded, photo
from tests.live_server import wait_for
from tests.model_store.backends import ClockedObjects, MemoryObjects
from tests.model_store.loop.items import add_item


class Refusing(MemoryObjects):
    """Refuses to write while it is told to."""

    refuses = False

    def create(self, name: str, data: bytes) -> bool:
        if self.refuses:
            raise WriteFailed(f"{name} could not be written: No space left on device")
        return super().create(name, data)


class Bench:
    """A writer with counts of its outcomes, and a clock that is set by hand."""

    def __init__(self, objects: Objects, **limits: Any) -> None:
        store = Store.create("models", objects=objects)
        self.inbox = Inbox(objects)
        self.process = Here()
        self.outcomes: Counter[str] = Counter()
        self.now = 1000.0
        self.writer = InboxWriter(
            InboxHandle(lambda: store),
            process=self.process,
            channel="production",
            limits=CollectLimits(**{"per_hour": 100, "total": 100, "days": 30.0, **limits}),
            on_outcome=lambda outcome: self.outcomes.update([outcome]),
            clock=lambda: self.now,
        )

    def offer(self, *seeds: int, rules: tuple[str, ...] = ("unknown",), **more: Any) -> list[str]:
        """Offer pictures, and wait until the writer has come to all of them."""
        before = self.outcomes.total()
        made = [candidate(seed, rules=rules, **more) for seed in seeds]
        for one in made:
            self.writer.offer(one)
        wait_for(lambda: self.outcomes.total() >= before + len(seeds))
        return [one.id for one in made]

    @property
    def kept(self) -> int:
        return len(list(self.inbox.objects.list_names("inbox/pictures")))


def candidate(seed: int, *, rules: tuple[str, ...] = ("unknown",), **more: Any) -> KeepCandidate:
    given = GivenAnswer(
        version=3, top=(("a", 0.5), ("b", 0.4)), margin=0.1, is_unknown=True, unknown_score=0.75
    )
    data = encoded(photo(seed), "PNG")
    return KeepCandidate(id=new_id(), data=data, given=given, rules=rules, **more)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(objects: Objects | None = None, **limits: Any) -> Bench:
        made.append(Bench(objects or MemoryObjects(), **limits))
        made[-1].writer.start()
        return made[-1]

    yield make
    for one in made:
        one.writer.stop()
        assert one.process.stopped


def test_a_picture_is_kept_with_its_answer_and_its_rule(bench: Callable[..., Bench]) -> None:
    one = bench()
    (item,) = one.offer(1, other=(2, "c"))
    record = one.inbox.item(item)
    assert (record.version, record.top[0].label, record.rules) == (3, "a", ("unknown",))
    assert (record.unknown, record.unknown_score) == (True, 0.75)
    assert (record.other_version, record.other_label) == (2, "c")
    assert (record.picture.width, record.picture.height) == (48, 32)
    assert one.inbox.picture(record)
    assert one.outcomes == {"kept": 1}


def test_caps_hold_and_what_is_over_is_counted(bench: Callable[..., Bench]) -> None:
    one = bench(per_hour=3)
    one.offer(*range(5))
    assert one.outcomes == {"kept": 3, "hour": 2}
    assert one.process.asked == 3  # nothing is decoded in vain
    one.offer(5, rules=(FEEDBACK,))  # a picture with feedback is not held to the hour
    one.now += 3600
    one.offer(6)
    assert one.outcomes["kept"] == 5
    full = bench(total=2)
    full.offer(*range(4))
    full.offer(9, rules=("keep",))
    assert full.outcomes == {"kept": 2, "total": 3}
    assert full.kept == 2


def test_near_duplicates_of_what_waits_are_left_out(bench: Callable[..., Bench]) -> None:
    one = bench()
    (first,) = one.offer(1)
    one.offer(1, 1, 2)
    assert one.outcomes == {"kept": 2, "duplicate": 2}
    one.offer(1, rules=("keep",))
    assert one.kept == 2
    one.offer(1, rules=(FEEDBACK,))
    assert one.kept == 3
    one.inbox.judge(first, Judgement.of_class("a"), actor="ann")


def test_keep_shuts_out_neither_rules_nor_feedback(bench: Callable[..., Bench]) -> None:
    for limits in ({"per_hour": 20}, {"total": 20}):
        one = bench(**limits)
        one.offer(*range(15), rules=("keep",))
        assert one.kept == 10
        one.offer(*range(20, 35))
        assert one.kept == 18
        one.offer(*range(40, 42), rules=(FEEDBACK,))
        assert one.kept == 20
        assert one.process.asked == 20, "nothing is decoded in vain"


def test_keep_leaves_room_in_the_queue() -> None:
    one = Bench(MemoryObjects())  # its thread does not run
    kinds = (("keep",), ("keep", "unknown"), (FEEDBACK,))
    taken = [sum(one.writer.offer(candidate(1, rules=kind)) for _ in range(70)) for kind in kinds]
    assert taken == [32, 26, 6]


def test_feedback_is_written_before_pictures_that_wait() -> None:
    """A stranger's large pictures would make a client that waits for its feedback give up."""
    one = Bench(MemoryObjects())
    for seed in range(3):
        one.writer.offer(candidate(seed, rules=("keep",)))
    kept: Future[Settled] = Future()
    waiting: list[int] = []
    kept.add_done_callback(lambda _: waiting.append(one.outcomes.total()))
    one.writer.offer(candidate(9, rules=(FEEDBACK,), kept=kept))
    one.writer.start()
    wait_for(lambda: one.outcomes.total() == 4)
    one.writer.stop()
    assert waiting == [1]


def test_nothing_is_kept_below_the_floor_of_free_disk(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    enough = bench(LocalDirectory(tmp_path / "one"), free_bytes=1)
    enough.offer(1)
    assert enough.outcomes == {"kept": 1}
    one = bench(LocalDirectory(tmp_path / "two"), free_bytes=1 << 60)
    kept: Future[Settled] = Future()
    one.offer(1, 2)
    one.offer(3, rules=(FEEDBACK,), kept=kept)
    assert one.outcomes == {"disk": 3}
    assert (one.kept, one.process.asked) == (0, 0)
    assert caplog.text.count("free-bytes of --collect") == 1
    with pytest.raises(NotKept, match="nearly full"):
        kept.result(1)


def test_another_process_sees_the_items_of_before(bench: Callable[..., Bench]) -> None:
    objects = MemoryObjects()
    bench(objects).offer(1, 2)
    again = bench(objects, total=3)
    again.offer(1)
    assert again.outcomes == {"duplicate": 1}
    again.offer(3, 4)
    assert again.outcomes == {"duplicate": 1, "kept": 1, "total": 1}


def test_a_bad_picture_is_dropped_and_the_thread_lives_on(bench: Callable[..., Bench]) -> None:
    one = bench()
    bad = candidate(1)
    object.__setattr__(bad, "data", b"no picture")
    one.writer.offer(bad)
    one.offer(2)
    wait_for(lambda: one.outcomes.total() == 2)
    assert one.outcomes == {"image": 1, "kept": 1}


def test_a_store_that_refuses_is_told_once(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    objects = Refusing()
    one = bench(objects)
    one.offer(1)
    caplog.set_level(logging.INFO, "dne_serve.loop")
    objects.refuses = True
    one.offer(*range(2, 12))
    one.now += writer_module.HOLD_OFF_S + 1
    one.offer(*range(12, 22))
    assert one.outcomes == {"kept": 1, "store": 20}
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert one.process.asked == 3  # between two tries nothing is decoded
    objects.refuses = False
    one.now += writer_module.HOLD_OFF_S + 1
    one.offer(30, 31)
    assert one.outcomes["kept"] == 3
    assert [record.message for record in caplog.records][1:] == ["pictures are kept again"]


def test_the_hand_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Bench(MemoryObjects())  # its thread does not run
    many = candidate(1, rules=(FEEDBACK,))
    taken = [one.writer.offer(many) for _ in range(writer_module.MAX_WAITING + 5)]
    assert taken.count(True) == writer_module.MAX_WAITING
    assert one.outcomes == {"queue": 5}
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 10)
    assert not Bench(MemoryObjects()).writer.offer(candidate(1))


def test_a_client_that_waits_is_told(bench: Callable[..., Bench]) -> None:
    objects = Refusing()
    one = bench(objects, total=1)
    outcomes: list[Future[Settled]] = [Future() for _ in range(3)]
    objects.refuses = True
    one.offer(1, rules=(FEEDBACK,), kept=outcomes[0])
    objects.refuses = False
    one.offer(2, rules=(FEEDBACK,), kept=outcomes[1])
    one.offer(3, rules=(FEEDBACK,), kept=outcomes[2])
    with pytest.raises(StoreError):
        outcomes[0].result(1)
    assert outcomes[1].result(1).outcome == "kept"
    with pytest.raises(NotKept, match="the inbox is full"):
        outcomes[2].result(1)


def test_what_waits_at_the_end_is_told_too() -> None:
    one = Bench(MemoryObjects())
    kept: Future[Settled] = Future()
    one.writer.offer(candidate(1, rules=(FEEDBACK,), kept=kept))
    one.writer.offer(candidate(2))
    one.writer._stopping = True
    one.writer.start()
    one.writer.stop()
    assert isinstance(kept.exception(1), Stopped)
    assert one.outcomes == {"queue": 2}
    assert not one.writer.offer(candidate(3))


def test_items_go_after_their_time(bench: Callable[..., Bench]) -> None:
    now = datetime.now(UTC)
    objects = ClockedObjects((now - timedelta(days=9)).timestamp())
    old = add_item(Inbox(objects), "old", since=now - timedelta(days=8))
    young = add_item(Inbox(objects), "young", since=now - timedelta(days=6))
    objects.now_s = now.timestamp()
    one = bench(objects, days=7.0)
    wait_for(lambda: old not in "".join(objects.held))
    assert young in "".join(objects.held)
    one.offer(1)
    assert one.kept == 2
