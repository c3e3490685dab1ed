"""Jobs over HTTP: labels that wait, asking, progress, cancelling, the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dne_serve.loop import job_routes
from model_store.loop import jobs as jobs_module
from model_store.loop.claim import JobClaim, heartbeat_name
from model_store.loop.inbox import Inbox, Judgement
from model_store.loop.jobs import Jobs
from model_store.records.jobs import MadeVersion
from model_store.records.sealing import seal
from model_store.store.store import Store
from tests.dne_serve.conftest import publish_digits, publish_letters
from tests.live_server import TOKEN, Live, assert_problem, live_server
from tests.model_store.loop.items import add_item

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


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


def test_who_may_only_read_sees_no_job(live: Live) -> None:
    assert_problem(live.http.get("/jobs"), 401)
    assert_problem(live.http.post("/jobs", json={}), 401)
    assert_problem(live.http.get("/jobs/none", headers=HEADERS), 404)
    assert_problem(live.admin("/jobs/none/cancel"), 404)
    assert_problem(live.admin("/jobs", other=1), 400)
