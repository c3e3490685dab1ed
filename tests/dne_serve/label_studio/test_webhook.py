"""Annotations that Label Studio tells of become labels of the inbox."""

from __future__ import annotations

from typing import Any

import pytest

from model_store.inbox.inbox import Judgement
from model_store.records.inbox import ItemRecord
from tests.dne_serve.label_studio.conftest import Backend
from tests.dne_serve.label_studio.requests_of_1_23 import (
    LATER,
    WHEN,
    annotation_of,
    chosen,
    deletion,
    event,
    typed,
)
from tests.live_server import assert_problem


def tell(
    backend: Backend, item: ItemRecord, annotation: dict[str, Any], action: str = "CREATED"
) -> list[str]:
    answer = backend.ask("webhook", event(f"ANNOTATION_{action}", annotation, backend.data(item)))
    assert answer.status_code == 200, answer.text
    return [one["outcome"] for one in answer.json()["outcomes"]]


def labels(backend: Backend, item: ItemRecord) -> list[str | None]:
    return [one.label for one in backend.inbox.history(item.id)]


def test_an_annotation_becomes_a_label_with_who_and_when(backend: Backend) -> None:
    item = backend.add(1)
    assert tell(backend, item, annotation_of(chosen("a"))) == ["labelled"]
    (record,) = backend.inbox.history(item.id)
    assert (record.kind, record.label, record.time) == ("label", "a", WHEN)
    assert record.actor.startswith("http:")
    assert record.actor.endswith("label-studio:user-1#3/51")
    listed = backend.live.http.get(
        "/inbox?state=labelled", headers={"Authorization": "Bearer a-token-for-tests"}
    ).json()
    assert item.id in [one["id"] for one in listed["items"]]


def test_a_changed_annotation_appends_and_a_repeated_one_does_not(backend: Backend) -> None:
    item = backend.add(2)
    tell(backend, item, annotation_of(chosen("a")))
    assert tell(backend, item, annotation_of(chosen("a"), time=LATER), "UPDATED") == ["already"]
    assert tell(backend, item, annotation_of(chosen("b"), time=LATER), "UPDATED") == ["labelled"]
    assert labels(backend, item) == ["a", "b"]


def test_a_cancelled_annotation_is_no_label(backend: Backend) -> None:
    item = backend.add(3)
    skipped = annotation_of(chosen("a"), was_cancelled=True)
    assert tell(backend, item, skipped) == ["cancelled"]
    assert tell(backend, item, annotation_of(number=52)) == ["empty"]
    assert labels(backend, item) == []


def test_a_label_that_is_cancelled_later_is_taken_back(backend: Backend) -> None:
    item = backend.add(4)
    tell(backend, item, annotation_of(chosen("a")))
    skipped = annotation_of(chosen("a"), was_cancelled=True, time=LATER)
    assert tell(backend, item, skipped, "UPDATED") == ["cleared"]
    assert [one.kind for one in backend.inbox.history(item.id)] == ["label", "clear"]


def test_a_newer_word_of_somebody_else_stands(backend: Backend) -> None:
    item = backend.add(5)
    backend.inbox.judge(item.id, Judgement.of_class("b"), actor="anna")
    assert tell(backend, item, annotation_of(chosen("a"))) == ["overtaken"]
    assert labels(backend, item) == ["b"]


def test_a_deleted_annotation_takes_its_own_label_back_and_no_other(backend: Backend) -> None:
    first, second, third = (backend.add(seed) for seed in (6, 7, 8))
    for number, item in ((61, first), (62, second), (63, third)):
        tell(backend, item, annotation_of(chosen("a"), number=number))
    backend.inbox.judge(second.id, Judgement.of_class("b"), actor="anna")
    assert backend.ask("webhook", deletion(61, project=4)).json() == {"outcomes": []}
    answer = backend.ask("webhook", deletion(61, 62, 999))
    assert answer.json()["outcomes"] == [{"annotation": 61, "item": first.id, "outcome": "cleared"}]
    assert labels(backend, first) == ["a", None]
    assert labels(backend, second) == ["a", "b"]
    assert labels(backend, third) == ["a"]


def test_a_typed_name_becomes_a_new_class_whatever_it_is(backend: Backend) -> None:
    item = backend.add(9)
    named = annotation_of(chosen("a"), typed(" <script>alert(1)<script> "))
    assert tell(backend, item, named) == ["labelled"]
    assert labels(backend, item) == ["<script>alert(1)<script>"]
    other = backend.add(10)
    comment = annotation_of(chosen("a"), typed("what a nice cat", control="comment"))
    tell(backend, other, comment)
    assert labels(backend, other) == ["a"]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (chosen("../up"), "folder"),
        (typed("line\nbreak"), "printable"),
        (typed("x" * 300), "longer than 200"),
        (chosen("a", "b"), "2 classes"),
    ],
)
def test_a_name_that_is_no_class_is_refused(
    backend: Backend, result: dict[str, Any], says: str
) -> None:
    item = backend.add(11)
    told = event("ANNOTATION_CREATED", annotation_of(result), backend.data(item))
    assert_problem(backend.ask("webhook", told), 422, says=says)
    assert labels(backend, item) == []


def test_valid_annotations_beside_a_bad_one_are_written(backend: Backend) -> None:
    good, bad = backend.add(12), backend.add(13)
    told = event("ANNOTATIONS_CREATED", {}, {})
    told["annotation"] = [
        annotation_of(chosen("../up"), number=71),
        annotation_of(chosen("a"), number=72),
    ]
    told["task"] = [{"data": backend.data(bad)}, {"data": backend.data(good)}]
    assert_problem(backend.ask("webhook", told), 422, says="annotation 71")
    assert (labels(backend, good), labels(backend, bad)) == (["a"], [])


def test_tasks_of_other_images_and_other_events_come_to_nothing(backend: Backend) -> None:
    gone = backend.add(14)
    backend.inbox.delete(gone.id)
    for data in ({"image": "https://example.org/cat.png"}, backend.data(gone)):
        told = event("ANNOTATION_CREATED", annotation_of(chosen("a")), data)
        answer = backend.ask("webhook", told).json()
        assert [one["outcome"] for one in answer["outcomes"]] == ["not of the inbox"]
    for action in ("START_TRAINING", "PROJECT_UPDATED", "TASKS_CREATED"):
        assert backend.ask("webhook", {"action": action}).json() == {"outcomes": []}


def test_an_event_without_its_payload_is_refused(backend: Backend) -> None:
    assert_problem(backend.ask("webhook", {"action": "ANNOTATION_CREATED"}), 400, says="XML")
    assert_problem(
        backend.ask("webhook", {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 1}]}),
        422,
        says="payload",
    )
