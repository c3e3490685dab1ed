from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from model_store.backends.base import Objects
from model_store.errors import (
    ItemNotFound,
    LabelConflict,
    LabelInvalid,
    LabelsFull,
    RecordInvalid,
    WriteFailed,
)
from model_store.layout import INBOX
from model_store.loop.inbox import CLEAR, DISCARD, MAX_LABELS, WRONG, Inbox, Judgement
from model_store.loop.item_names import item_name, label_name, new_id, picture_name, removed_name
from model_store.loop.items import (
    delete_items,
    delete_leftovers,
    forget_items,
    labelled_items,
    open_index,
    overdue,
)
from model_store.records.inbox import ItemRecord, LabelRecord
from model_store.records.sealing import create_record
from tests.model_store.backends import ClockedObjects, MemoryObjects, WatchedObjects
from tests.model_store.loop.items import NOON, add_item, item_record, picture_bytes

ANN: dict[str, Any] = {"actor": "ann@host"}


@pytest.fixture
def inbox(objects: Objects) -> Inbox:
    return Inbox(objects)


def _names(inbox: Inbox) -> list[str]:
    return sorted(inbox.objects.list_names(INBOX))


def test_an_item_comes_back_with_its_picture_and_its_answer(inbox: Inbox) -> None:
    record = item_record("a mug", score=0.25, other_label="cup", other_version=2)
    inbox.add(record, picture_bytes("a mug"))
    assert inbox.item(record.id) == record
    assert inbox.picture(record) == picture_bytes("a mug")
    assert inbox.history(record.id) == []
    inbox.add(record, picture_bytes("a mug"))  # once more changes nothing
    assert len(_names(inbox)) == 2


def test_the_last_label_counts_and_history_stays(inbox: Inbox) -> None:
    item = add_item(inbox, "a mug")
    said = [Judgement.of_class("mug"), WRONG, DISCARD, CLEAR, Judgement.of_class("cup")]
    for judgement in said:
        inbox.judge(item, judgement, **ANN)
    history = inbox.history(item)
    assert [one.number for one in history] == [1, 2, 3, 4, 5]
    assert [(one.kind, one.label) for one in history] == [(one.kind, one.label) for one in said]
    head = inbox.head(item)
    assert head is not None
    assert head.label == "cup"
    assert head.actor == "ann@host"
    assert [one.label for one in labelled_items(inbox, open_index(inbox))] == ["cup"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 60, MAX_LABELS])
def test_the_newest_label_is_found_by_its_name(count: int) -> None:
    objects = WatchedObjects(MemoryObjects())
    inbox = Inbox(objects)
    item = add_item(inbox, "a mug")
    for _ in range(count):
        inbox.judge(item, WRONG, **ANN)
    objects.calls.clear()
    assert inbox.newest_number(item) == count
    head = inbox.head(item)
    assert (head.number if head else 0) == count
    assert len(objects.calls) <= 4 * count.bit_length() + 3  # two searches and a reading
    assert not objects.names("list")


def test_an_item_takes_a_hundred_labels_and_its_last_one_stands() -> None:
    inbox = Inbox(MemoryObjects())
    item = add_item(inbox, "a mug")
    for n in range(MAX_LABELS):
        inbox.judge(item, Judgement.of_class(f"{n}"), **ANN)
    for after in (None, MAX_LABELS):
        with pytest.raises(LabelsFull, match="100 label records"):
            inbox.judge(item, CLEAR, after=after, **ANN)
    with pytest.raises(LabelConflict):
        inbox.judge(item, CLEAR, after=3, **ANN)
    head = inbox.head(item)
    assert head is not None
    assert (head.label, len(inbox.history(item))) == ("99", MAX_LABELS)
    inbox.delete(item)
    assert not _names(inbox)


def test_history_is_read_from_any_number_on(inbox: Inbox) -> None:
    item = add_item(inbox, "a mug")
    for judgement in (WRONG, DISCARD, CLEAR):
        inbox.judge(item, judgement, **ANN)
    assert [one.kind for one in inbox.history(item, after=1)] == ["discard", "clear"]
    assert inbox.history(item, after=3) == []


def test_two_people_do_not_overwrite_each_other(inbox: Inbox) -> None:
    item = add_item(inbox, "a mug")
    inbox.judge(item, Judgement.of_class("mug"), after=0, **ANN)
    with pytest.raises(LabelConflict, match="ann@host has written 'mug' as record 1") as raised:
        inbox.judge(item, Judgement.of_class("cup"), after=0, actor="bob@host")
    assert (raised.value.number, raised.value.said) == (1, "mug")
    inbox.judge(item, Judgement.of_class("cup"), after=1, actor="bob@host")
    assert [one.label for one in inbox.history(item)] == ["mug", "cup"]


def test_of_many_writers_at_once_each_gets_a_number_and_one_wins_the_seen_state(
    inbox: Inbox,
) -> None:
    item = add_item(inbox, "a mug")
    start = threading.Barrier(4)

    def label(name: str) -> bool:
        start.wait()
        inbox.judge(item, Judgement.of_class(name), actor=name)
        try:
            inbox.judge(item, Judgement.of_class(name), actor=name, after=4)
        except LabelConflict:
            return False
        return True

    with ThreadPoolExecutor(4) as people:
        won = list(people.map(label, ["a", "b", "c", "d"]))
    history = inbox.history(item)
    assert {one.label for one in history[:4]} == {"a", "b", "c", "d"}
    assert len(history) == 4 + sum(won)
    assert sum(won) <= 1


def test_a_deletion_leaves_nothing(inbox: Inbox) -> None:
    item, other = add_item(inbox, "a mug"), add_item(inbox, "a cup")
    inbox.judge(item, Judgement.of_class("mug"), **ANN)
    inbox.judge(item, Judgement.of_class("cup"), **ANN)
    inbox.delete(item)
    assert all(other in name for name in _names(inbox))
    with pytest.raises(ItemNotFound):
        inbox.judge(item, Judgement.of_class("mug"), **ANN)
    inbox.delete(item)  # twice is no error
    assert inbox.picture(inbox.item(other)) == picture_bytes("a cup")


def test_a_label_for_an_item_that_is_deleted_meanwhile_is_taken_back() -> None:
    objects = MemoryObjects()
    item = add_item(Inbox(objects), "a mug")

    def delete_first(verb: str, name: str) -> None:
        if verb == "create" and name.startswith("inbox/labels"):
            Inbox(objects).delete(item)

    with pytest.raises(ItemNotFound):
        Inbox(WatchedObjects(objects, before=delete_first)).judge(item, WRONG, **ANN)
    assert not objects.held


def test_an_item_that_is_deleted_while_it_is_written_leaves_no_picture() -> None:
    objects = MemoryObjects()
    record = item_record("a mug")

    def delete_first(verb: str, name: str) -> None:
        if verb == "create" and name.startswith("inbox/pictures"):
            Inbox(objects).delete(record.id)

    Inbox(WatchedObjects(objects, before=delete_first)).add(record, picture_bytes("a mug"))
    assert not objects.held


@pytest.mark.parametrize("name", ["", " mug", "a/b", "..", "a\nb", "x" * 201, "\u202ex"])
def test_a_label_that_cannot_name_a_class_is_refused(name: str) -> None:
    with pytest.raises(LabelInvalid):
        Judgement.of_class(name)


def test_markup_is_a_name_like_any_other(objects: Objects) -> None:
    inbox = Inbox(objects)
    item = add_item(inbox, "a mug")
    inbox.judge(item, Judgement.of_class("<script>"), **ANN)
    head = inbox.head(item)
    assert head is not None
    assert head.label == "<script>"


def test_a_planted_record_with_a_path_for_a_label_is_refused() -> None:
    objects = MemoryObjects()
    inbox = Inbox(objects)
    item = add_item(inbox, "a mug")
    bad = LabelRecord.model_construct(
        format=1,
        item=item,
        number=1,
        kind="label",
        label="../../etc",
        actor="x",
        time="2026-11-17T12:00:00Z",
        transaction="0" * 32,
    )
    create_record(objects, label_name(item, 1), bad)
    with pytest.raises(RecordInvalid):
        inbox.head(item)
    assert list(labelled_items(inbox, open_index(inbox))) == []


@pytest.mark.parametrize("item", ["", "..", "20261117t120000000-0", "../store", "x" * 500])
def test_text_that_is_no_id_is_an_item_that_is_not_there(item: str) -> None:
    for ask in (Inbox(MemoryObjects()).item, Inbox(MemoryObjects()).delete):
        with pytest.raises(ItemNotFound):
            ask(item)


def test_a_changed_picture_is_refused() -> None:
    objects = MemoryObjects()
    inbox = Inbox(objects)
    record = inbox.item(add_item(inbox, "a mug"))
    objects.held[picture_name(record)] = picture_bytes("a cup")
    with pytest.raises(RecordInvalid, match="digest"):
        inbox.picture(record)


class FullDisk(MemoryObjects):
    """Takes so many objects and no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def create(self, name: str, data: bytes) -> bool:
        if len(self.held) >= self.room:
            raise WriteFailed(f"{name} could not be written: no space left")
        return super().create(name, data)


@pytest.mark.parametrize("room", [0, 1])
def test_an_item_that_does_not_fit_is_not_there(room: int) -> None:
    inbox = Inbox(FullDisk(room))
    with pytest.raises(WriteFailed):
        add_item(inbox, "a mug")
    index = open_index(inbox)
    assert len(index) == 0
    delete_leftovers(inbox, index, days=1, now=NOON + timedelta(days=2))
    assert _names(inbox) == []


def test_retention_takes_what_is_old_but_no_label_that_nobody_has_learnt(inbox: Inbox) -> None:
    old = [add_item(inbox, f"old {n}") for n in range(5)]
    young = add_item(inbox, "young", minutes=60 * 24 * 9)
    inbox.judge(old[1], Judgement.of_class("mug"), **ANN)
    inbox.judge(old[2], Judgement.of_class("mug"), **ANN)
    inbox.judge(old[3], DISCARD, **ANN)
    inbox.judge(old[4], Judgement.of_class("mug"), **ANN)
    inbox.use(7, {old[2]: 1, old[4]: 1}, actor="trainer")
    inbox.judge(old[4], Judgement.of_class("cup"), **ANN)  # since then somebody changed it
    index = open_index(inbox)
    gone = overdue(inbox, index, days=7, now=NOON + timedelta(days=10))
    assert gone == sorted([old[0], old[2], old[3]])
    delete_items(inbox, index, gone)
    left = {old[1], old[4], young}
    assert {row.id for row in index.rows()} == left
    assert {row.id for row in open_index(inbox).rows()} == left
    assert not [name for name in _names(inbox) for gone in (old[0], old[2], old[3]) if gone in name]


def test_an_id_of_a_server_whose_clock_is_behind_is_not_overdue() -> None:
    objects = ClockedObjects((NOON + timedelta(days=365)).timestamp())
    inbox = Inbox(objects)
    item = add_item(inbox, "new", since=NOON)  # its server lives a year ago
    index = open_index(inbox)
    for days, due in ((6, []), (8, [item])):
        now = NOON + timedelta(days=365 + days)
        assert overdue(inbox, index, days=7, now=now) == due


def test_labels_that_a_version_has_used_are_left_out(inbox: Inbox) -> None:
    items = [add_item(inbox, f"{n}") for n in range(3)]
    for item in items:
        inbox.judge(item, Judgement.of_class("mug"), **ANN)
    inbox.use(7, {items[0]: 1, items[1]: 1}, actor="trainer")
    inbox.judge(items[1], Judgement.of_class("cup"), **ANN)
    index = open_index(inbox)

    def unused(versions: list[int]) -> set[str]:
        return {one.record.id for one in labelled_items(inbox, index, but_used_by=versions)}

    assert unused([7]) == set(items[1:])
    assert unused([6]) == set(items)  # version 7 is of another lineage


def test_forgetting_a_class_takes_its_labels_and_its_answers(inbox: Inbox) -> None:
    answered = add_item(inbox, "1", label="mug")
    labelled = add_item(inbox, "2", label="cup")
    corrected = add_item(inbox, "3", label="mug")
    other = add_item(inbox, "4", label="cup")
    inbox.judge(labelled, Judgement.of_class("mug"), **ANN)
    inbox.judge(corrected, Judgement.of_class("cup"), **ANN)
    assert forget_items(inbox, open_index(inbox), ["mug"]) == 2
    assert {row.id for row in open_index(inbox).rows()} == {corrected, other}
    assert not [name for name in _names(inbox) if answered in name or labelled in name]


def test_an_item_under_the_name_of_another_is_refused() -> None:
    objects = MemoryObjects()
    record, other = item_record("a"), item_record("b")
    create_record(objects, item_name(other.id), record)
    with pytest.raises(RecordInvalid, match="it says it is item"):
        Inbox(objects).item(other.id)
    assert isinstance(record, ItemRecord)


def test_an_item_that_was_deleted_does_not_come_back(inbox: Inbox) -> None:
    item = add_item(inbox, "1", label="mug")
    record = inbox.item(item)
    recent = record.model_copy(update={"id": new_id()})
    inbox.add(recent, inbox.picture(record))
    picture = inbox.picture(recent)
    inbox.delete(recent.id)
    with pytest.raises(ItemNotFound):
        inbox.add(recent, picture)
    left = [name for name in inbox.objects.list_names("inbox") if recent.id in name]
    assert left == [removed_name(recent.id)]
    inbox.drop_removals(datetime.now(UTC) + timedelta(days=1))
    assert removed_name(recent.id) in inbox.objects.list_names("inbox/removed")
    inbox.drop_removals(datetime.now(UTC) + timedelta(days=3))
    assert not inbox.objects.list_names("inbox/removed")
