"""Follow the channel in a real server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dne_serve.rollout.reloader import NICENESS
from model_store.records.manifest import Manifest, ShardRef
from model_store.store.store import Store
from tests.live_server import Live, live_server, png, wait_for
from tests.tiny_versions import flip_last_bit, promote, publish_tiny


def test_a_flipped_bit_keeps_the_old_version_serving_and_says_so(
    live: Live, store: Store, digits: Manifest
) -> None:
    third = publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    flip_last_bit(store, third.experts[-1])
    promote(store, third)
    wait_for(lambda: live.http.get("/readyz").json()["error"] is not None)
    ready = live.http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["version"] == 2
    assert third.experts[-1].sha256 in ready.json()["error"]
    assert live.predict(png()).json()["version"] == 2
    assert live.metric("dne_failed_loads_total") >= 1
    assert live.metric("dne_following") == 0
    store.rollback(channel="production", to=1, actor="tests", reason="")
    live.wait_until_serving(1)
    assert live.http.get("/readyz").json()["error"] is None


def test_a_server_that_starts_with_a_broken_head_serves_the_version_before_and_says_so(
    store: Store, digits: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    third = publish_tiny(store, tasks=[("greek", ["alpha"])], parent=digits, seed=5)
    mend = break_expert(store, third)
    promote(store, third)
    with live_server(Path(store.location), guard="errors>1%") as live:
        live.wait_until_serving(2)
        ready = live.http.get("/readyz").json()
        assert (ready["fallback"], ready["head"], ready["record"]) == (True, 3, 2)
        assert third.experts[-1].sha256 in ready["error"]
        assert (live.metric("dne_fallback"), live.metric("dne_following")) == (1, 0)
        assert live.serving._guard._watch is None  # it was not promoted just now
        assert live.predict(png()).json()["version"] == 2
        mend()
        live.wait_until_serving(3)
        ready = live.http.get("/readyz").json()
        assert (ready["fallback"], ready["head"], ready["error"]) == (False, 3, None)
        assert (live.metric("dne_fallback"), live.metric("dne_following")) == (0, 1)
    assert "version 2 is served until the head can be" in caplog.text


def break_expert(store: Store, manifest: Manifest) -> Callable[[], None]:
    """Damages the newest expert; what it returns mends it."""
    ref = manifest.experts[-1]
    path = Path(store.location, "shards", ref.sha256[:2], f"{ref.sha256}.safetensors")
    whole = path.read_bytes()
    flip_last_bit(store, ref)
    return lambda: void(path.write_bytes(whole))


def void(_: object) -> None: ...


def test_loading_the_next_version_reads_only_the_delta(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read_shard = Store.read_shard

    def counted(self: Store, ref: ShardRef) -> bytes:
        reads.append(ref.sha256)
        return read_shard(self, ref)

    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        second = publish_tiny(store, tasks=[("digits", ["0", "1"])], parent=letters, seed=1)
        monkeypatch.setattr(Store, "read_shard", counted)
        promote(store, second)
        live.wait_until_serving(2)
        assert sorted(reads) == sorted([second.experts[1].sha256, second.classifier.sha256])
        reads.clear()
        assert live.predict(png(), query="?version=1").status_code == 200
        assert reads == []


def test_a_request_keeps_the_version_it_began_with(live: Live) -> None:
    """The first half of the body comes before the rollback, the second half after it."""
    half_sent, moved = threading.Event(), threading.Event()
    image = png(3)

    def body() -> Iterator[bytes]:
        yield image[:20]
        half_sent.set()
        moved.wait(20)
        yield image[20:]

    answers = []

    def ask() -> None:
        headers = {"Content-Type": "image/png"}
        answers.append(live.http.post("/predict", content=body(), headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    half_sent.wait(20)
    wait_for(lambda: live.metric("dne_requests_under_way") == 2)  # it, and the question itself
    assert live.admin("/rollback", to=1).status_code == 200
    moved.set()
    asking.join()
    assert answers[0].json()["version"] == 2
    assert live.predict(png(3)).json()["version"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_that_loads_gives_way_to_those_that_answer(live: Live) -> None:
    by_name = {thread.name: thread for thread in threading.enumerate()}
    niceness = {
        name: os.getpriority(os.PRIO_PROCESS, by_name[name].native_id or 0)
        for name in ("reloader", "engine")
    }
    assert niceness["reloader"] == niceness["engine"] + NICENESS


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_where_priorities_are_forbidden_versions_are_served_all_the_same(
    store: Store, letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        assert live.predict(png()).status_code == 200
