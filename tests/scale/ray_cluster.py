"""A real Ray cluster of one node on this machine, asked through its HTTP interface alone."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import pytest
import yaml

from tests.live_server import wait_for
from tests.trained_store import ROOT

SLOW_S = 240.0
"""For anything to happen on a machine that has much else to do."""
STARTS, STARTED = 3, "will now block forever"
CORES = 8
"""Cores that Ray believes in: enough for replicas, their replacements and a job."""
STORE_BYTES = 80 << 20
Change = Callable[[dict[str, Any]], None]

PATIENCE = {
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Time for Ray's own processes: a node that is only slow must not be taken for dead."""

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="RAY IS NOT INSTALLED, SO NOTHING WAS TRIED ON IT: docs/ray.md says how to",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    pid: int | None
    state: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    address: str
    """Of the dashboard, which takes jobs and applications."""
    url: str
    """Of Ray Serve's proxy."""
    environment: dict[str, str]

    def deploy(self, store: Path, change: Change = lambda application: None) -> None:
        """Send `deploy/ray/serve.yaml` as `serve deploy` does, for two replicas of `store`."""
        config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
        config["http_options"]["port"] = httpx.URL(self.url).port
        [application] = config["applications"]
        application["args"] = {
            "store": str(store),
            "allow_open": True,
            "backend": "torch",
            "poll_seconds": 0.25,
            "start_seconds": 60,
        }
        [deployment] = application["deployments"]
        deployment["ray_actor_options"]["num_cpus"] = 1
        deployment["autoscaling_config"] |= {"min_replicas": 2, "max_replicas": 2}
        change(application)
        self._ask("PUT", json=config)

    def remove(self) -> None:
        self._ask("DELETE")

    def application(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET").json()["applications"].get("dne", {})
        return found

    def replicas(self) -> list[Replica]:
        deployment = self.application().get("deployments", {}).get("dne", {})
        return [
            Replica(pid=one.get("pid"), state=one["state"], name=one["replica_id"])
            for one in deployment.get("replicas", [])
        ]

    def running(self) -> set[str]:
        return {one.name for one in self.replicas() if one.state == "RUNNING"}

    def wait_until_running(self, count: int) -> None:
        """Wait until so many replicas run and no other one is starting or stopping."""
        wait_for(
            lambda: [one.state for one in self.replicas()] == ["RUNNING"] * count, seconds=SLOW_S
        )

    def _ask(self, method: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        url = f"{self.address}/api/serve/applications/"
        answer = httpx.request(method, url, headers=headers, timeout=SLOW_S, **more)
        answer.raise_for_status()
        return answer


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    # A short path: it becomes part of the names of Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="dne-ray-", dir="/tmp"))
    ports = _free_ports(5)
    environment = _environment()
    options = {
        "--port": ports[0],
        "--dashboard-port": ports[1],
        "--dashboard-agent-listen-port": ports[2],
        "--ray-client-server-port": ports[3],
        "--num-cpus": CORES,
        "--object-store-memory": STORE_BYTES,
        "--temp-dir": folder,
        "--include-log-monitor": False,
    }
    words = [str(word) for pair in options.items() for word in pair]
    head = _start(words, environment=environment, log=folder / "start.log")
    try:
        yield Cluster(
            address=f"http://127.0.0.1:{ports[1]}",
            url=f"http://127.0.0.1:{ports[4]}",
            environment=environment,
        )
    finally:
        head.terminate()  # which ends everything that it has started
        head.wait(timeout=SLOW_S)
        shutil.rmtree(folder, ignore_errors=True)


def _start(words: list[str], *, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a node. Ray gives itself 30 s for it, which a busy machine may not have."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
    for _ in range(STARTS):
        with log.open("wb") as said:
            head = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        _wait_for_start(head, log)
        if head.poll() is None:
            return head
    raise AssertionError(f"ray start has ended {STARTS} times: {log.read_text()[-2000:]}")


def _wait_for_start(head: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the node is there or has given up."""
    try:
        wait_for(lambda: STARTED in log.read_text() or head.poll() is not None, seconds=SLOW_S)
    except BaseException:
        head.terminate()
        raise


def _environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **PATIENCE,
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
