"""The loop on object storage: two servers and one worker share a bucket and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.cli.main import main as dne_store
from model_store.store.store import Store
from tests.e2e.test_learn_page import _image as red_image
from tests.live_server import TOKEN, wait_for
from tests.trained_store import TrainedStore

pytestmark = pytest.mark.slow
MAIN = "import sys; from {}.cli import main; sys.exit(main())"
IMAGES = 24
MINUTES_S = 400.0


@contextmanager
def command(package: str, *arguments: str, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A real command in a process of its own, with a cache of its own, as on another machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(package), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "DNE_CACHE": str(cache),
            "DNE_ADMIN_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def server(store: str, cache: Path) -> Iterator[httpx.Client]:
    options = ("--store", store, "--port", "0", "--threads", "1", "--json")
    rules = ("--collect", "sample=100%")
    with command("dne_serve", *options, *rules, cache=cache) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
            wait_for(lambda: http.get("/readyz").status_code == 200, seconds=MINUTES_S)
            yield http


def predict(http: httpx.Client, seed: int) -> dict[str, Any]:
    headers = {"Content-Type": "image/png"}
    answer = http.post("/predict", content=red_image(seed), headers=headers)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def served(http: httpx.Client) -> int:
    found: int = http.get("/readyz").json().get("version", 0)
    return found


def inbox(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/inbox", params={"limit": 500, "state": "unlabelled"})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def settled(http: httpx.Client) -> float:
    """Count the pictures that the server has kept or dropped."""
    counted = ("dne_collected_images_total", "dne_collect_dropped_images_total{")
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counted))


@pytest.mark.timeout(1500)
def test_what_one_server_collects_another_labels_and_both_serve_what_a_worker_learns(
    s3_location: str, trained_store: TrainedStore, tmp_path: Path
) -> None:
    assert dne_store(["copy", "--store", str(trained_store.pretrained), "--to", s3_location]) == 0
    with ExitStack() as running:
        one, other = (
            running.enter_context(server(s3_location, tmp_path / f"cache-{n}")) for n in range(2)
        )
        before = served(one)
        assert before == served(other) > 0

        for number in range(IMAGES):  # collect
            predict(one, number)
        wait_for(lambda: settled(one) == IMAGES, seconds=MINUTES_S)
        assert inbox(one)["total"] > IMAGES // 2
        wait_for(lambda: inbox(other)["total"] == inbox(one)["total"], seconds=MINUTES_S)

        for item in inbox(other)["items"]:  # label, at the other server
            body = {"label": "zebra", "after": 0}
            other.post(f"/inbox/{item['id']}/label", json=body).raise_for_status()
        assert inbox(other)["items"] == []
        wait_for(lambda: inbox(one)["counts"]["unlabelled"] == 0, seconds=MINUTES_S)
        labelled = one.get("/inbox", params={"state": "labelled"}).json()["items"]
        again = {"label": "horse", "after": 0}
        refused = one.post(f"/inbox/{labelled[0]['id']}/label", json=again)
        assert refused.status_code == 409, "a server overwrote what another had written"

        asked = one.post("/jobs", json={"reason": "enough labels"}).raise_for_status().json()
        assert asked["state"] == "waiting"
        assert other.post("/jobs", json={}).status_code == 409
        options = ("--store", s3_location, "--poll-seconds", "0.2", "--threads", "1")
        more = ("--device", "cpu", "--checkpoint", str(tmp_path / "checkpoint"))
        running.enter_context(
            command("trainer", "worker", *options, *more, cache=tmp_path / "cache-worker")
        )
        job: dict[str, Any] = {}

        def has_ended() -> bool:
            job.update(other.get(f"/jobs/{asked['id']}").raise_for_status().json())
            return job["ended"] is not None

        wait_for(has_ended, seconds=MINUTES_S)
        assert job["state"] == "promoted", job
        made = job["versions"][-1]
        assert (made["promoted"], made["new_classes"], job["before"]) == (True, ["zebra"], before)
        assert made["old_after"]["images"] > 0

        for http in (one, other):  # both serve it
            wait_for(lambda: served(http) == made["version"], seconds=MINUTES_S)  # noqa: B023
            answer = predict(http, 99)
            assert answer["version"] == made["version"]
            assert answer["predictions"][0]["label"] == "zebra"
            shown = http.get("/classes/examples", params={"label": "zebra"}).json()
            assert shown["pictures"], shown["note"]
        assert other.get("/jobs").json()["waiting"]["new"] == []

        other.post("/rollback", json={"to": before, "reason": "a test"}).raise_for_status()
        for http in (one, other):
            wait_for(lambda: served(http) == before, seconds=MINUTES_S)  # noqa: B023
        waiting = one.get("/jobs").json()["waiting"]
        assert [found["label"] for found in waiting["new"]] == ["zebra"], "the labels wait again"
    assert not Store.open(s3_location).verify().problems
