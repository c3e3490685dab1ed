from __future__ import annotations

from pathlib import Path

import pytest

from dne_serve.rollout.loaded_versions import bytes_of
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import TOKEN, Live, assert_problem, live_server, png
from tests.tiny_versions import flip_last_bit, publish_tiny

ROUTES = ("/rollback", "/promote", "/resume")


def shard_files(store: Store) -> dict[str, tuple[int, int]]:
    """Name, inode and time of change of every shard."""
    files = (path for path in Path(store.location, "shards").rglob("*") if path.is_file())
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_rollback_answers_when_the_version_is_served(live: Live, store: Store) -> None:
    answer = live.admin("/rollback", to=1, reason="too many twos")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["version"], body["channel"]) == (1, "production")
    assert live.predict(png()).json()["version"] == 1
    record = store.head("production")
    assert record is not None
    assert body["record"] == record.model_dump()
    assert (record.target, record.mode, record.reason) == (1, "pin", "too many twos")
    assert record.actor == "http:127.0.0.1"


def test_rollback_without_a_body_goes_to_the_version_before(live: Live) -> None:
    answer = live.http.post("/rollback", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["version"] == 1


def test_rollback_moves_no_shards_and_reads_none(live: Live, store: Store) -> None:
    assert live.predict(png(), query="?version=1").status_code == 200
    before = shard_files(store)
    reads: list[str] = []
    opened = live.serving.open_store()
    read_shard = opened.read_shard
    opened.read_shard = lambda ref: reads.append(ref.sha256) or read_shard(ref)  # type: ignore[method-assign,func-returns-value]
    assert live.admin("/rollback", to=1).status_code == 200
    assert live.admin("/resume").status_code == 200
    assert shard_files(store) == before
    assert reads == []


def test_a_rollback_stays_until_someone_moves_on(live: Live, store: Store) -> None:
    live.admin("/rollback", to=1)
    assert live.http.get("/versions").json()["mode"] == "pin"
    assert live.admin("/resume", reason="fixed").json()["version"] == 2
    assert live.http.get("/versions").json()["mode"] == "follow"
    assert live.admin("/promote", to=1).json()["version"] == 1
    assert live.http.get("/versions").json()["mode"] == "follow"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/rollback", {"to": 0}),
        ("/rollback", {"to": "one"}),
        ("/rollback", {"version": 1}),
        ("/promote", {}),
        ("/promote", {"to": None}),
        ("/resume", {"to": 1}),
        ("/rollback", {"to": 1, "reason": "x" * 501}),
    ],
)
def test_a_malformed_move_is_400(steady: Live, route: str, body: object) -> None:
    before = steady.history()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert_problem(steady.http.post(route, json=body, headers=headers), 400, says="body")
    assert steady.history() == before


def test_a_body_that_is_not_json_is_refused(steady: Live) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "text/plain"}
    assert_problem(steady.http.post("/rollback", content=b"{}", headers=headers), 415)
    headers["Content-Type"] = "application/json"
    assert_problem(steady.http.post("/rollback", content=b"{", headers=headers), 400)


def test_a_version_that_does_not_exist_is_404(steady: Live) -> None:
    before = steady.history()
    assert_problem(steady.admin("/rollback", to=9), 404)
    assert_problem(steady.admin("/promote", to=9), 404)
    assert steady.history() == before


def test_nothing_to_go_back_to_is_409(live: Live) -> None:
    assert_problem(live.admin("/resume"), 409)
    live.admin("/rollback")
    assert_problem(live.admin("/rollback"), 409)


@pytest.mark.parametrize("route", ["/promote", "/rollback"])
def test_a_channel_does_not_move_to_a_version_that_cannot_be_loaded(
    live: Live, store: Store, route: str
) -> None:
    broken = publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    flip_last_bit(store, broken.classifier)
    before = store.history("production")
    answer = live.admin(route, to=broken.version)
    assert_problem(answer, 503, says="channel production was not moved")
    assert broken.classifier.sha256 in answer.json()["detail"]
    assert store.history("production") == before
    assert live.predict(png()).json()["version"] == 2
    assert live.http.get("/readyz").json()["error"] is None


def test_a_rollback_is_not_resumed_to_a_version_that_cannot_be_loaded(
    store: Store, digits: Manifest
) -> None:
    store.rollback(channel="production", to=1, actor="tests", reason="")
    flip_last_bit(store, digits.classifier)
    before = store.history("production")
    with live_server(Path(store.location)) as live:
        live.wait_until_serving(1)
        assert_problem(live.admin("/resume"), 503, says="production was not moved")
        assert store.history("production") == before


def test_a_version_that_would_not_fit_into_memory_is_not_promoted(
    live: Live, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    monkeypatch.setattr(live.serving.shared.memory, "_available", lambda: 1000)
    assert_problem(live.admin("/promote", to=large.version), 503, says="not moved: version 3 needs")
    assert [record.target for record in store.history("production")] == [1, 2]


def test_a_head_that_cannot_be_loaded_is_rolled_back(store: Store, digits: Manifest) -> None:
    third = publish_tiny(store, tasks=[("odd", ["x"])], parent=digits, seed=9)
    flip_last_bit(store, third.experts[-1])
    store.promote(3, channel="production", actor="tests", reason="")
    with live_server(Path(store.location)) as live:
        live.wait_until_serving(2)  # the one before stands in
        answer = live.admin("/rollback")
        assert (answer.status_code, answer.json()["version"]) == (200, 2)
        ready = live.http.get("/readyz").json()
        assert (ready["error"], ready["fallback"], ready["mode"]) == (None, False, "pin")


def test_a_version_that_the_residents_let_go_of_at_once_is_loaded_once_and_served(
    store: Store, digits: Manifest
) -> None:
    """With a limit below two versions, the one that is loaded first leaves before it is served."""
    other = publish_tiny(store, tasks=[("odd", ["x"])], seed=9)
    with live_server(Path(store.location), max_model_bytes=bytes_of([digits])) as live:
        live.wait_until_serving(2)
        assert live.admin("/promote", to=other.version).json()["version"] == 3
        assert live.predict(png()).json()["version"] == 3
        assert live.metric("dne_resident_versions") == 1
