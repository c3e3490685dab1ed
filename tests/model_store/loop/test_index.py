from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.backends.base import Objects
from model_store.errors import WrongUsage
from model_store.loop import index as index_module
from model_store.loop.inbox import CLEAR, DISCARD, WRONG, Inbox, Judgement
from model_store.loop.index import STATES, Index, Order, State
from model_store.loop.item_names import facts_of, picture_name, short_of
from model_store.loop.items import open_index, read_items
from tests.model_store.backends import MemoryObjects, WatchedObjects
from tests.model_store.loop.items import add_item, item_record

ORDERS: list[Order] = ["newest", "uncertain", "unknown", "disagreeing"]
MUG = Judgement.of_class("mug")


def _walk(index: Index, order: Order, *, states: list[State], limit: int) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = index.page(order=order, states=states, cursor=cursor, limit=limit)
        assert len(page.rows) <= limit
        found += [row.id for row in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            return found


ITEMS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, MUG, WRONG, DISCARD, CLEAR]),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(items=ITEMS, limit=st.integers(1, 5))
def test_pages_of_every_order_and_state_hold_each_item_once(
    items: list[tuple[float, float | None, bool, bool, Judgement | None]], limit: int
) -> None:
    inbox = Inbox(MemoryObjects())
    facts: dict[str, tuple[float, float, bool, bool, State]] = {}
    for n, (score, odds, unknown, differs, judgement) in enumerate(items):
        item = add_item(
            inbox,
            str(n),
            minutes=n,
            score=score,
            unknown=unknown,
            unknown_score=odds,
            other_label="cup" if differs else None,
            other_version=2 if differs else None,
        )
        state: State = "unlabelled"
        if judgement is not None:
            record = inbox.judge(item, judgement, actor="ann")
            state = index_module.STATE_OF[record.kind]
        facts[item] = (score, -(odds or 0.0), not unknown, differs, state)
    index = open_index(inbox)
    newest = sorted(facts, reverse=True)
    expected = {
        "newest": newest,
        "uncertain": sorted(newest, key=lambda one: facts[one][0]),
        "unknown": sorted(newest, key=lambda one: (facts[one][2], facts[one][1])),
        "disagreeing": [one for one in newest if facts[one][3]],
    }
    for order in ORDERS:
        assert _walk(index, order, states=list(STATES), limit=limit) == expected[order]
        for state in STATES:
            wanted = [one for one in expected[order] if facts[one][4] == state]
            assert _walk(index, order, states=[state], limit=limit) == wanted
    counted = {state: sum(one[4] == state for one in facts.values()) for state in STATES}
    assert index.counts() == counted


def test_a_cursor_goes_on_after_an_item_that_is_gone() -> None:
    inbox = Inbox(MemoryObjects())
    items = [add_item(inbox, str(n), minutes=n, score=0.5) for n in range(6)][::-1]
    index = open_index(inbox)
    for order in ("newest", "uncertain"):
        page = index.page(order=order, limit=2)
        index.deleted(items[1])
        rest = index.page(order=order, limit=9, cursor=page.next_cursor)
        assert [row.id for row in rest.rows] == items[2:]
        index.refresh(whole=True)


@pytest.mark.parametrize("cursor", ["", "x", "0~..", "99999~20261117t120000000-0123456789ab"])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with pytest.raises(WrongUsage):
        Index(Inbox(MemoryObjects())).page(limit=1, cursor=cursor)


def test_the_index_sees_what_others_do(objects: Objects) -> None:
    inbox, other = Inbox(objects), Inbox(objects)
    index = Index(inbox)
    index.refresh()
    assert len(index) == 0
    item = add_item(other, "a mug")
    index.refresh(whole=True)
    assert len(index) == 1
    other.judge(item, MUG, actor="ann")
    index.refresh(whole=True)
    row = index.find(item)
    assert row is not None
    assert (row.state, row.number) == ("labelled", 1)
    other.judge(item, CLEAR, actor="ann")
    index.refresh(whole=True)
    assert index.counts()["unlabelled"] == 1
    other.delete(item)
    index.refresh(whole=True)
    assert len(index) == 0


def test_an_index_is_built_from_names_alone() -> None:
    objects = MemoryObjects()
    for n in range(20):
        add_item(Inbox(objects), str(n), minutes=n)
    watched = WatchedObjects(objects)
    index = Index(Inbox(watched))
    index.refresh()
    assert len(index) == 20
    assert [verb for verb, _ in watched.calls if verb == "read"] == []


def test_a_look_soon_after_another_asks_nothing() -> None:
    watched = WatchedObjects(MemoryObjects())
    now = [100.0]
    index = Index(Inbox(watched), clock=lambda: now[0])
    index.refresh()
    asked = len(watched.calls)
    index.refresh()
    assert len(watched.calls) == asked
    now[0] += index_module.LOOK_S + 0.1
    index.refresh()
    assert {verb for verb, _ in watched.calls[asked:]} == {"list"}


def test_the_name_of_a_picture_tells_its_facts() -> None:
    record = item_record(
        "x", score=0.4567, unknown=True, unknown_score=0.9, dhash=0xABC, other_label="y"
    )
    short = short_of(picture_name(record))
    assert short is not None
    facts = facts_of(short)
    assert (facts.id, facts.score, facts.unknown_score) == (record.id, 457, 900)
    assert facts.is_unknown
    assert facts.disagrees
    assert facts.dhash == 0xABC


@pytest.mark.parametrize("name", ["inbox/pictures/x", "inbox/pictures/20261117/a.jpg", "shards/x"])
def test_other_names_are_no_pictures(name: str) -> None:
    assert short_of(name) is None


def test_items_that_vanish_are_passed_over() -> None:
    objects = MemoryObjects()
    inbox = Inbox(objects)
    kept, gone = add_item(inbox, "1"), add_item(inbox, "2")
    rows = open_index(inbox).rows()
    inbox.delete(gone)
    assert [item.record.id for item in read_items(inbox, rows)] == [kept]
