"""Annotations come back as labels, once."""

from __future__ import annotations

import pytest

from model_store.errors import WrongUsage
from model_store.loop.inbox import Inbox, Judgement
from model_store.store.store import Store
from tests.dne_serve.loop.requests_of_1_23 import chosen, typed
from tests.model_store.loop.items import add_item
from tests.trainer.loop.fake_label_studio import FakeLabelStudio
from trainer.loop.label_studio import ProjectChoice, Pulled, pull, push

PETS = ProjectChoice(project=None, title="pets")
LATER = "2026-11-17T12:30:00.000000Z"


@pytest.fixture
def items(fake: FakeLabelStudio, store: Store, inbox: Inbox) -> list[str]:
    """Three pictures that were pushed."""
    made = [add_item(inbox, f"picture {number}", minutes=number) for number in range(3)]
    with fake.open() as server:
        push(server, PETS, store=store, channel="production", limit=10)
    return made


def pulled(fake: FakeLabelStudio, store: Store) -> Pulled:
    with fake.open() as server:
        return pull(server, PETS, store=store)


def labels(inbox: Inbox, item: str) -> list[str | None]:
    return [one.label for one in inbox.history(item)]


def test_labels_are_written_with_who_and_when(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    fake.annotate(items[0], chosen("dog"))
    fake.annotate(items[1], typed("<script>"))
    done = pulled(fake, store)
    assert done.outcomes == {"labelled": 2}
    assert done.classes == {"dog": 1, "<script>": 1}
    (record,) = inbox.history(items[0])
    assert record.label == "dog"
    assert record.actor == "label-studio:anna@example.org#1/50"
    assert record.time == "2026-11-17T12:00:00.500000Z"
    assert labels(inbox, items[1]) == ["<script>"]
    assert labels(inbox, items[2]) == []


def test_pulling_again_writes_only_changes(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    made = fake.annotate(items[0], chosen("dog"))
    pulled(fake, store)
    assert pulled(fake, store).outcomes == {"already": 1}
    made.update(result=[chosen("cat")], updated_at=LATER)
    assert pulled(fake, store).outcomes == {"labelled": 1}
    assert labels(inbox, items[0]) == ["dog", "cat"]


def test_a_later_label_of_the_label_page_stands(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    fake.annotate(items[0], chosen("dog"))
    pulled(fake, store)
    inbox.judge(items[0], Judgement.of_class("cat"), actor="anna")
    assert pulled(fake, store).outcomes == {"already": 1}
    inbox.judge(items[1], Judgement.of_class("cat"), actor="anna")
    fake.annotate(items[1], chosen("dog"))
    assert pulled(fake, store).outcomes == {"already": 1, "overtaken": 1}
    assert labels(inbox, items[0]) == ["dog", "cat"]
    assert labels(inbox, items[1]) == ["cat"]


def test_cancelled_annotations_are_passed_over_and_the_newest_other_counts(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    fake.annotate(items[0], chosen("dog"), was_cancelled=True)
    fake.annotate(items[1], chosen("cat"))
    fake.annotate(items[1], chosen("dog"), time="2026-11-17T12:20:00Z")
    fake.annotate(items[1], chosen("cat"), time=LATER, was_cancelled=True)
    assert pulled(fake, store).outcomes == {"cancelled": 1, "labelled": 1}
    assert labels(inbox, items[0]) == []
    assert labels(inbox, items[1]) == ["dog"]


def test_bad_names_and_deleted_items_do_not_stop_the_others(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    fake.annotate(items[0], typed("../up"))
    fake.annotate(items[1], chosen("dog"))
    fake.annotate(items[2], chosen("dog"))
    inbox.delete(items[1])
    done = pulled(fake, store)
    assert done.outcomes == {"gone": 1, "labelled": 1}
    (refused,) = done.refused
    assert items[0] in refused
    assert "folder" in refused
    assert labels(inbox, items[2]) == ["dog"]


def test_a_time_in_the_future_or_in_no_form_is_now(
    fake: FakeLabelStudio, store: Store, inbox: Inbox, items: list[str]
) -> None:
    fake.annotate(items[0], chosen("dog"), time="2999-01-01T00:00:00Z")
    fake.annotate(items[1], chosen("dog"), time="yesterday")
    pulled(fake, store)
    for item in items[:2]:
        (record,) = inbox.history(item)
        assert "2026-01-01" < record.time < "2999"


def test_tasks_of_other_pictures_are_left_alone(
    fake: FakeLabelStudio, store: Store, items: list[str]
) -> None:
    fake.tasks[99] = {
        "id": 99,
        "project": 1,
        "data": {"image": "https://example.org/cat.png"},
        "annotations": [{"id": 1, "result": [chosen("dog")]}],
    }
    assert pulled(fake, store).outcomes == {}


def test_pull_makes_no_project(fake: FakeLabelStudio, store: Store) -> None:
    with pytest.raises(WrongUsage, match="push"):
        pulled(fake, store)
    assert fake.projects == {}
