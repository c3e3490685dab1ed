"""Steady traffic while versions are published, promoted and rolled back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from dne_serve.engines.candidates import CANDIDATES
from dne_serve.engines.choose import make_candidate
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.live_server import Live, live_server, png
from tests.tiny_versions import promote, publish_tiny

CHANGES = 20
CLIENTS = 4
PAUSE_S = 0.02
"""Between two requests of a client. Several that never pause leave a swap no processor time."""
IMAGES = [png(seed) for seed in range(3)]


@dataclass(slots=True)
class Traffic:
    """What clients saw: versions and labels of every answer, and everything that went wrong."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    failed: list[str] = field(default_factory=list)
    answered: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def run(self, *, query: str = "", pause_s: float = 0) -> None:
        files = [("files", (f"{i}.png", image)) for i, image in enumerate(IMAGES)]
        with httpx.Client(base_url=self.url, timeout=30) as http:
            while not self.stop.is_set():
                try:
                    answer = http.post(f"/predict{query}", files=files)
                    answer.raise_for_status()
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                body = answer.json()
                labels = tuple(one["label"] for one in body["predictions"])
                self.answered.append((body["version"], labels))
                self.stop.wait(pause_s)

    def wait_for_more(self, count: int) -> None:
        goal = len(self.answered) + count
        while len(self.answered) < goal and not self.failed:
            time.sleep(0.002)


def change(live: Live, store: Store, number: int, newest: Manifest) -> Manifest:
    """One of the ways in which a channel moves; every fourth brings a new task."""
    if number % 4 == 0:
        name = f"task{number}"
        tasks = [(name, [f"{name}-{i}" for i in range(3)])]
        newest = promote(store, publish_tiny(store, tasks=tasks, parent=newest, seed=number))
        live.wait_until_serving(newest.version)
    elif number % 4 == 1:
        assert live.admin("/rollback", reason="a test").status_code == 200
    elif number % 4 == 2:
        store.resume(channel="production", actor="tests", reason="")
        live.wait_until_serving(newest.version)
    else:
        assert live.admin("/promote", to=newest.version).status_code == 200
    return newest


@pytest.mark.long
def test_no_request_fails_while_versions_come_and_go(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "models"))
    newest = promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])]))
    with live_server(tmp_path / "models", max_resident=1) as live:
        live.wait_until_ready()
        traffic = Traffic(live.url)
        queries = [""] * CLIENTS + ["?version=1"]
        clients = [
            threading.Thread(target=traffic.run, kwargs={"query": query, "pause_s": PAUSE_S})
            for query in queries
        ]
        for client in clients:
            client.start()
        for number in range(CHANGES):
            newest = change(live, store, number, newest)
            traffic.wait_for_more(10)
        traffic.stop.set()
        for client in clients:
            client.join()

    assert traffic.failed == []
    assert len(traffic.answered) >= 10 * CHANGES
    known = {version: set(store.manifest(version).spec.classes) for version in store.versions()}
    assert {version for version, _ in traffic.answered} == set(known)
    for version, labels in traffic.answered:
        assert set(labels) <= known[version]
    # Every version answers the same images alike, whatever was swapped around it.
    assert len(set(traffic.answered)) == len(known)


def test_after_the_first_answer_of_a_new_version_none_of_the_old_one_follows(
    tmp_path: Path,
) -> None:
    store = Store.create(str(tmp_path / "models"))
    first = promote(store, publish_tiny(store, tasks=[("letters", ["a", "b"])]))
    with live_server(tmp_path / "models") as live:
        live.wait_until_ready()
        traffic = Traffic(live.url)
        client = threading.Thread(target=traffic.run)
        client.start()
        parent = first
        for number in range(5):
            tasks = [(f"t{number}", [f"c{number}"])]
            parent = promote(store, publish_tiny(store, tasks=tasks, parent=parent))
            live.wait_until_serving(parent.version)
        traffic.stop.set()
        client.join()
    versions = [version for version, _ in traffic.answered]
    assert traffic.failed == []
    assert versions == sorted(versions)


SWITCHES = 50


@pytest.mark.long
def test_no_request_fails_while_engines_switch(tmp_path: Path) -> None:
    """Pinned and served versions change their engine together, and answer the same."""
    pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    store = Store.create(str(tmp_path))
    first = promote(store, publish_tiny(store))
    second = promote(store, publish_tiny(store, tasks=[("more", ["x", "y"])], parent=first))
    candidates = [CANDIDATES[number] for number in (0, 2, 1)]  # onnx, torch, onnx packed
    with live_server(tmp_path, max_batch=4) as live:
        live.wait_until_serving(second.version)
        traffic = Traffic(live.url)
        threads = [
            threading.Thread(target=traffic.run, kwargs={"query": query, "pause_s": PAUSE_S})
            for query in 2 * ["", f"?version={first.version}"]
        ]
        for thread in threads:
            thread.start()
        for number in range(SWITCHES):
            one = candidates[number % len(candidates)]
            engine = make_candidate(one, threads=2, max_batch=4)
            room = live.serving.shared.room
            before = [resident.model for resident in room._reads]
            room.switch(engine)
            assert live.serving.engine is engine
            after = [resident.model for resident in room._reads]
            assert not set(map(id, before)) & set(map(id, after))  # pinned versions, too
            traffic.wait_for_more(3)
        traffic.stop.set()
        for thread in threads:
            thread.join()
    assert traffic.failed == []
    assert len(traffic.answered) >= 3 * SWITCHES
    assert {version for version, _ in traffic.answered} == {first.version, second.version}
    assert len(set(traffic.answered)) == 2  # the same labels by every engine
