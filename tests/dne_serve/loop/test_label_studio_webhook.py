"""Annotations that Label Studio tells of become labels of the inbox."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from dne_serve.loop.label_studio import MAX_ANNOTATIONS
from model_store.backends.local import LocalDirectory
from model_store.loop.inbox import MAX_LABELS, Inbox, Judgement
from model_store.records.inbox import ItemRecord, LabelRecord
from tests.dne_serve.loop.conftest import Backend, basic
from tests.dne_serve.loop.requests_of_1_23 import (
    LATER,
    WHEN,
    annotation_of,
    chosen,
    deletion,
    event,
    typed,
)
from tests.dne_serve.wire.test_limits import connect
from tests.live_server import LONG_S, TOKEN, assert_problem, wait_for


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


def many(backend: Backend, items: list[ItemRecord], *, count: int) -> dict[str, Any]:
    """An event of annotations that go round the items."""
    told = event("ANNOTATIONS_CREATED", {}, {})
    told["annotation"] = [annotation_of(chosen("ab"[n % 2]), number=1000 + n) for n in range(count)]
    told["task"] = [{"data": backend.data(items[n % len(items)])} for n in range(count)]
    return told


def test_an_event_of_more_than_500_annotations_is_413_and_writes_nothing(backend: Backend) -> None:
    item = backend.add(15)
    told = many(backend, [item], count=MAX_ANNOTATIONS + 1)
    assert_problem(backend.ask("webhook", told), 413, says="501 annotations, and at most 500")
    assert labels(backend, item) == []
    gone = deletion(*range(1, MAX_ANNOTATIONS + 2))
    assert_problem(backend.ask("webhook", gone), 413, says="501 annotations")


def test_an_item_that_an_event_tells_of_many_times_is_read_once(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, told = backend.add(16), 60
    read: list[str] = []
    real = LocalDirectory.read

    def counting(self: LocalDirectory, name: str, *, max_bytes: int) -> bytes:
        read.append(name)
        return real(self, name, max_bytes=max_bytes)

    monkeypatch.setattr(LocalDirectory, "read", counting)
    assert backend.ask("webhook", many(backend, [item], count=told)).status_code == 200
    assert len(labels(backend, item)) == told
    looks = [name for name in read if name.startswith("inbox/labels")]
    assert len(looks) < 20 * told  # the square would be 1,800 and more


def test_labels_beyond_the_hundredth_of_an_item_are_refused_by_name(backend: Backend) -> None:
    full, other = backend.add(17), backend.add(18)
    told = many(backend, [full], count=MAX_LABELS + 1)
    told["annotation"].append(annotation_of(chosen("a"), number=9))
    told["task"].append({"data": backend.data(other)})
    answer = backend.ask("webhook", told)
    assert_problem(answer, 422, says=f"annotation 1100: item {full.id} has 100 label records")
    assert len(labels(backend, full)) == MAX_LABELS
    assert labels(backend, other) == ["a"]
    one = backend.live.admin(f"/inbox/{full.id}/label", label="a")
    assert_problem(one, 409, says="an item may have no more")


def test_an_event_stops_between_two_annotations_when_its_client_has_gone(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [backend.add(19 + n) for n in range(5)]
    begun, gone = threading.Event(), threading.Event()
    real = Inbox.judge

    def slow(self: Inbox, *given: Any, **options: Any) -> LabelRecord:
        begun.set()
        assert gone.wait(LONG_S)
        return real(self, *given, **options)

    monkeypatch.setattr(Inbox, "judge", slow)
    body = json.dumps(many(backend, items, count=5)).encode()
    token = basic(TOKEN)["Authorization"]
    head = (
        f"POST /label-studio/webhook HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with connect(backend.live, head.encode() + body):
        assert begun.wait(LONG_S)
    backend.live.http.get("/healthz")  # the server has read the end of the connection
    gone.set()
    wait_for(lambda: backend.live.serving.labellers.count == 0)
    assert [len(labels(backend, one)) for one in items] == [1, 0, 0, 0, 0]
