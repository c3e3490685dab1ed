"""Jobs over HTTP: labels that wait, asking, progress, cancelling, the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dne_serve.loop import job_routes
from model_store.layout import version_name
from model_store.loop import jobs as jobs_module
from model_store.loop.claim import JobClaim, heartbeat_name
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.jobs import Jobs
from model_store.records.jobs import MadeVersion
from model_store.records.manifest import Draft, Manifest
from model_store.records.sealing import seal
from model_store.store.store import Store
from model_store.worth import CROSS_VALIDATED
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import TOKEN, Live, assert_problem, live_server, wait_for
from tests.model_store.drafts import GEOMETRY, prepare
from tests.model_store.loop.items import add_item
from tests.tiny_versions import promote

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SEALED = {"version", "digest", "signature"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "models"))
    publish_letters(store)
    return store


@pytest.fixture
def live(store: Store) -> Iterator[Live]:
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        yield live


def label(store: Store, name: str, count: int) -> None:
    inbox = Inbox(store.objects)
    for number in range(count):
        item = add_item(inbox, f"{name} {number}", minutes=number / 60)
        inbox.judge(item, Judgement.of_class(name), actor="tests")


def claim(store: Store) -> JobClaim:
    found = Jobs(store.objects).claim_next(channel="production", worker="a worker")
    assert found is not None
    return found


def read(live: Live, path: str) -> Any:
    answer = live.http.get(path, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_labels_that_wait_are_counted_by_class(live: Live, store: Store) -> None:
    known = store.manifest(1).classes[0]
    for name, count in ((known, 2), ("<b>zebra</b>".replace("/", ""), 3), ("rare", 1)):
        label(store, name, count)
    live.serving.inbox_handle.index.refresh(whole=True)
    waiting = read(live, "/jobs")["waiting"]
    assert waiting["known"] == [{"label": known, "images": 2}]
    assert waiting["new"] == [{"label": "<b>zebra<b>", "images": 3}]
    assert [one["label"] for one in waiting["left"]] == ["rare"]


def test_a_job_is_asked_for_shown_and_cancelled(live: Live, store: Store) -> None:
    assert_problem(live.admin("/jobs"), 409, says="label images first")
    label(store, "zebra", 2)
    live.serving.inbox_handle.index.refresh(whole=True)
    asked = live.admin("/jobs", reason="enough").json()
    assert (asked["state"], asked["reason"], asked["worker"]) == ("waiting", "enough", None)
    assert_problem(live.admin("/jobs"), 409, says="under way")
    held = claim(store)
    held.heartbeat("learning", share=0.25, seconds_left=12.0, log=["a line"])
    running = read(live, f"/jobs/{asked['id']}")
    assert (running["state"], running["worker"]) == ("running", "a worker")
    assert (running["phase"], running["share"], running["seconds_left"]) == ("learning", 0.25, 12)
    assert running["log"] == ["a line"]
    cancelled = live.admin(f"/jobs/{asked['id']}/cancel")
    assert cancelled.json()["state"] == "cancelling"
    assert read(live, "/jobs")["jobs"][0]["id"] == asked["id"]


def test_a_worker_without_a_sign_of_life_is_told(
    live: Live, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    label(store, "new", 2)
    job = live.http.post("/jobs", json={}, headers=HEADERS).json()["id"]
    claim(store).heartbeat("learning", share=0.5)
    assert read(live, f"/jobs/{job}")["state"] == "running"
    monkeypatch.setattr(jobs_module, "LEASE_S", -1.0)
    monkeypatch.setattr(job_routes, "LEASE_S", -1.0)
    found = read(live, f"/jobs/{job}")
    assert (found["state"], found["worker"]) == ("lost", "a worker")


def test_a_beat_with_an_impossible_time_leaves_the_list_readable(live: Live, store: Store) -> None:
    label(store, "zebra", 2)
    live.serving.inbox_handle.index.refresh(whole=True)
    job = live.admin("/jobs").json()["id"]
    claim(store).heartbeat("learning")
    beat = Jobs(store.objects).job(job).heartbeat
    assert beat is not None
    name = heartbeat_name(job, 1, 1)
    store.objects.delete(name)
    forged = beat.model_dump(mode="json") | {"time": "9999-99-99T99:99:99Z"}
    store.objects.create(name, seal(forged))
    (listed,) = read(live, "/jobs")["jobs"]
    assert (listed["id"], listed["worker"], listed["phase"]) == (job, "a worker", None)
    assert live.admin(f"/jobs/{job}/cancel").json()["state"] == "cancelling"


def test_the_verdict_has_accuracies_with_their_ranges(live: Live, store: Store) -> None:
    label(store, "zebra", 2)
    live.serving.inbox_handle.index.refresh(whole=True)
    job = live.admin("/jobs").json()["id"]
    publish_digits(store, store.manifest(1))
    made = MadeVersion(version=2, promoted=False, refused="the gate refused it")
    claim(store).end("refused", reason="the gate refused it", versions=[made], log=["the end"])
    told = read(live, f"/jobs/{job}")
    assert (told["state"], told["said"], told["before"]) == ("refused", "the gate refused it", 1)
    (version,) = told["versions"]
    assert (version["version"], version["promoted"]) == (2, False)
    assert version["delta_bytes"] > 0
    assert told["log"] == ["the end"]


PROSPECT = (
    "cross-validation: 60.0 %; adapting the first expert to these 2 classes usually gains 20 "
    "points or more"
)


def publish_promising(store: Store, *, parent: Manifest | None = None, images: int = 8) -> Manifest:
    """A version of a pre-trained network that has much to win, and whose images are kept."""
    pretrained = replace(GEOMETRY, token="in-sequence")
    figures = {CROSS_VALIDATED: 0.6}
    made = prepare(parent=parent, geometry=pretrained, training=figures, images=images)
    return promote(store, made.publish(store))


@pytest.fixture
def promising(tmp_path: Path) -> Iterator[tuple[Live, Store]]:
    store = Store.create(str(tmp_path / "promising"))
    publish_promising(store)
    with live_server(Path(store.location), audit_log=tmp_path / "audit") as live:
        live.wait_until_ready()
        yield live, store


def test_a_worker_is_asked_to_adapt_what_is_worth_it(
    promising: tuple[Live, Store], tmp_path: Path
) -> None:
    live, store = promising
    assert read(live, "/versions")["growth"] == {"version": 1, "says": PROSPECT}
    assert read(live, "/versions/1/report.json")["proposal"] == PROSPECT
    asked = live.admin("/jobs", kind="grow", reason="it is night").json()
    assert (asked["kind"], asked["state"], asked["reason"]) == ("grow", "waiting", "it is night")
    audit = tmp_path / "audit"
    wait_for(lambda: audit.exists() and audit.read_text() != "")
    line = json.loads(audit.read_text().splitlines()[-1])
    assert (line["kind"], line["job"], line["reason"]) == ("grow", asked["id"], "it is night")
    assert_problem(live.admin("/jobs", kind="grow"), 409, says="under way")
    assert read(live, f"/jobs/{asked['id']}")["kind"] == "grow"
    assert live.admin(f"/jobs/{asked['id']}/cancel").json()["state"] == "cancelled"
    assert Jobs(store.objects).job(asked["id"]).record.kind == "grow"


def test_adapting_is_asked_for_by_administrators_in_known_words(
    promising: tuple[Live, Store],
) -> None:
    live, _ = promising
    assert_problem(live.http.post("/jobs", json={"kind": "grow"}), 401)
    assert_problem(live.admin("/jobs", token="wrong", kind="grow"), 403)
    assert_problem(live.admin("/jobs", kind="shrink"), 400)
    assert_problem(live.admin("/jobs", kind="grow", reason="x" * 501), 400)
    form = {**HEADERS, "Content-Type": "application/x-www-form-urlencoded"}
    assert_problem(live.http.post("/jobs", content=b"kind=grow", headers=form), 415)
    assert read(live, "/jobs")["jobs"] == []


def test_nothing_is_proposed_where_it_was_tried_or_cannot_work(
    promising: tuple[Live, Store],
) -> None:
    live, store = promising
    first = store.manifest(1)
    tried = first.model_copy(update={"parent": 1, "parent_digest": first.digest, "adapted": True})
    store.publish(Draft.model_validate(tried.model_dump(by_alias=True, exclude=SEALED)), shards={})
    assert read(live, "/versions")["growth"] is None
    assert read(live, "/versions/1/report.json")["proposal"] is None
    assert_problem(live.admin("/jobs", kind="grow"), 409, says="was adapted before")
    few = publish_promising(store, parent=first, images=2)
    live.wait_until_serving(few.version)
    assert read(live, "/versions")["growth"] is None
    assert_problem(live.admin("/jobs", kind="grow"), 409, says="keeps too few images")


def test_an_unreadable_version_hides_neither_the_page_nor_the_report(
    promising: tuple[Live, Store],
) -> None:
    live, store = promising
    store.objects.create(version_name(9), b"no manifest")
    assert read(live, "/versions")["growth"] is None  # it may be the one that was adapted
    assert read(live, "/versions/1/report.json")["proposal"] is None


def test_who_may_only_read_sees_no_job(live: Live) -> None:
    assert_problem(live.http.get("/jobs"), 401)
    assert_problem(live.http.post("/jobs", json={}), 401)
    assert_problem(live.http.get("/jobs/none", headers=HEADERS), 404)
    assert_problem(live.admin("/jobs/none/cancel"), 404)
    assert_problem(live.admin("/jobs", other=1), 400)
