"""A real Prometheus with the files of `deploy/` scrapes a real server, and is asked every query of
the dashboard and of the rules."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.store.store import Store
from tests.abuse.victim import COMMAND
from tests.campaigns import AddRow
from tests.live_server import wait_for
from tests.packaging.monitoring import PROMETHEUS, dashboard_queries, rule_queries, rules
from tests.s3_server import free_ports
from tests.scale.fleet import status
from tests.trained_store import TrainedStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRAPES_S = 12
"""Long enough for two scrapes in each window, and for the rules that stand on rules."""


@contextmanager
def running(command: list[str], url: str, **environment: str) -> Iterator[None]:
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        wait_for(lambda: status(url) == 200, seconds=60)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def write_configuration(folder: Path, *, server: int, own: int) -> Path:
    """Take the files of `deploy/`, with other ports and one scrape a second."""
    text = (PROMETHEUS / "prometheus.yml").read_text()
    for old, new in (
        ("server:8000", f"127.0.0.1:{server}"),
        ("localhost:9090", f"127.0.0.1:{own}"),
        ("interval: 15s", "interval: 1s"),
    ):
        assert old in text
        text = text.replace(old, new)
    shutil.copy(PROMETHEUS / "rules.yml", folder / "rules.yml")
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


class Asking:
    """Predictions, one after the other, until the end of the block."""

    def __init__(self, url: str, images: list[bytes]) -> None:
        self._url, self._images = url, images
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers: list[dict[str, Any]] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._over.wait(0.05):
                image = self._images[len(self.answers) % len(self._images)]
                answer = client.post("/predict", content=image)
                self.answers.append(answer.raise_for_status().json())


def ask(url: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query})
    assert answer.status_code == 200, f"{query}\n{answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="PROMETHEUS WAS NOT TRIED: it is not installed"
)
def test_prometheus_answers_every_query_of_the_dashboard_and_of_the_rules(
    trained_copy: TrainedStore, tmp_path: Path, scale_row: AddRow
) -> None:
    server, own = free_ports(2)
    server_url, url = f"http://127.0.0.1:{server}", f"http://127.0.0.1:{own}"
    serve = [*COMMAND, "--port", str(server), "--store", str(trained_copy.location)]
    configuration = write_configuration(tmp_path, server=server, own=own)
    prometheus = [
        "prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}", "--log.level=error",
    ]  # fmt: skip
    images = [trained_copy.image(name) for name in ("a", "0", "plus")]
    store = Store.open(str(trained_copy.location))
    with (
        running(serve, f"{server_url}/readyz", DNE_BACKEND="torch", OMP_NUM_THREADS="1"),
        running(prometheus, f"{url}/-/ready"),
        Asking(server_url, images) as asking,
    ):
        wait_for(lambda: len(asking.answers) > 20, seconds=60)
        store.rollback(channel="production", actor="tests", reason="", to=trained_copy.second)
        wait_for(lambda: asking.answers[-1]["version"] == trained_copy.second, seconds=60)
        threading.Event().wait(SCRAPES_S)
        queries = [*dashboard_queries(), *rule_queries()]
        silent = [query for query in queries if not ask(url, query)]
        # A version has an index of drift after 500 answers, and with enough held-out images.
        assert [query for query in silent if "dne_drift_psi" not in query] == []
        firing = {one["metric"]["alertname"] for one in ask(url, 'ALERTS{alertstate="firing"}')}
        assert firing == set()
        (served,) = ask(url, "dne_served_version")
        assert served["value"][1] == str(trained_copy.second)
        health = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    states = {rule["name"]: rule["health"] for group in health for rule in group["rules"]}
    assert len(states) == len(rules())
    assert set(states.values()) == {"ok"}
    scale_row(
        "dashboard and rules",
        f"{len(queries)} queries to a real Prometheus",
        f"every one answered; {len(asking.answers)} predictions, no alert",
    )
