"""The whole story on object storage: three commands, one bucket, two servers on one channel."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.cli.main import main as dne_store
from model_store.store.store import Store
from tests.live_server import live_server, wait_for
from tests.machine import know_machine, run_folder
from tests.trained_store import TrainedStore
from tests.trainer.folders import SIZES, write_classes
from trainer.cli import main as dne_train

SERVE = (sys.executable, "-c", "import sys; from dne_serve.cli import main; sys.exit(main())")
QUICK = ("--epochs", "1", "--augment", "none", "--threads", "1")
ROLLBACK_S = 5.0
LONG_S = 180.0  # of a command: machines that run tests may be busy


def run(command: Callable[[Sequence[str]], int], *arguments: str) -> dict[str, Any]:
    """Call a command, and read the JSON object that it ends with; the store is $DNE_STORE."""
    with redirect_stdout(io.StringIO()) as printed:
        assert command([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return found


@contextmanager
def server(cache: Path) -> Iterator[httpx.Client]:
    """A server with a cache of its own, as on another machine. It may not be ready yet."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--threads", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "DNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with httpx.Client(base_url=url, timeout=30) as http:
            yield http
    finally:
        process.kill()
        process.communicate()


def answer(http: httpx.Client, image: bytes) -> tuple[int, str]:
    """Version and label, or (0, "") while there is none."""
    found = http.post("/predict", files=[("files", ("image.png", image))])
    if found.status_code == 503:
        return 0, ""
    body = found.raise_for_status().json()
    return body["version"], body["predictions"][0]["label"]


@pytest.mark.long
@pytest.mark.timeout(480)
def test_two_servers_follow_one_channel_on_object_storage_and_roll_back_together(
    s3_location: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("DNE_STORE", s3_location)
    monkeypatch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
    know_machine()
    first = write_classes(tmp_path / "first", ("ant", "bee"))
    second = write_classes(tmp_path / "second", ("cat", "dog"))
    images = {path.parent.name: path.read_bytes() for path in sorted(tmp_path.rglob("*.png"))}

    with ExitStack() as running:
        both = [running.enter_context(server(tmp_path / f"cache-{n}")) for n in range(2)]
        assert all(http.get("/readyz").status_code == 503 for http in both)

        learnt = run(dne_train, "add-task", "--data", str(first), *SIZES, *QUICK)
        assert (learnt["version"], learnt["promoted"]) == (1, True)
        for http in both:
            wait_for(lambda: answer(http, images["ant"])[0] == 1, seconds=LONG_S)  # noqa: B023

        learnt = run(dne_train, "add-task", "--data", str(second), *QUICK)
        assert (learnt["version"], learnt["parent"]) == (2, 1)
        if not learnt["promoted"]:  # so small a network may not pass the gate
            run(dne_store, "promote", "2")
        for http in both:
            wait_for(lambda: answer(http, images["cat"])[0] == 2, seconds=LONG_S)  # noqa: B023
        labels = {name: {answer(http, image)[1] for http in both} for name, image in images.items()}
        assert all(len(found) == 1 for found in labels.values()), "the servers disagree"

        began_s = time.monotonic()
        moved = run(dne_store, "rollback", "--reason", "a test")
        for http in both:
            wait_for(lambda: answer(http, images["cat"])[0] == 1, seconds=ROLLBACK_S)  # noqa: B023
        assert time.monotonic() - began_s < ROLLBACK_S
        assert {answer(http, images["cat"])[1] for http in both} <= {"ant", "bee"}
        assert moved["target"] == 1

    listed = run(dne_store, "list")
    assert [row["version"] for row in listed["versions"]] == [1, 2]
    assert run(dne_store, "verify")["problems"] == []
    # Each server has kept the weights near it, and no images. What it measured may be there too.
    store = Store.open(s3_location)
    kept = {ref.sha256 for version in (1, 2) for ref in store.manifest(version).model_shards}
    for number in range(2):
        files = {path.name for path in (tmp_path / f"cache-{number}").iterdir()}
        assert files - {"engine.json", "precision.json"} == kept


def test_a_store_of_every_kind_of_version_is_copied_there_and_served(
    s3_location: str, trained_store: TrainedStore
) -> None:
    here = str(trained_store.location)
    assert dne_store(["copy", "--store", here, "--to", s3_location]) == 0
    assert dne_store(["verify", "--store", s3_location]) == 0
    with live_server(s3_location) as live:
        live.wait_until_serving(trained_store.served)
        for version in trained_store.versions:
            assert live.http.get(f"/versions/{version}").status_code == 200
            found = live.predict(trained_store.image("a"), query=f"?version={version}")
            assert found.json()["version"] == version
