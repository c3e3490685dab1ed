"""Someone who pastes the blocks of a document in order, servers into a second terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.guide_blocks import Block
from tests.trainer.fake_hub import fake_hub
from tests.trainer.vit import write_vit
from trainer.backbones.known import FIRST

NEAR_HUB = Path(__file__).parent / "near_hub"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def hub_nearby(folder: Path) -> Iterator[dict[str, str]]:
    """Serve a tiny tower under the name that the documents tell people to begin with.

    Yield the variables that lead the commands there.
    """
    (folder / "tower").mkdir()
    write_vit(folder / "tower/model.safetensors")
    with fake_hub() as hub:
        hub.add(FIRST.repository, folder / "tower")
        yield hub.environment(folder / "hf") | {"PYTHONPATH": str(NEAR_HUB)}


class Reader:
    """Runs blocks in a folder, with the commands of the environment that runs the tests."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        commands = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "DNE_PORT": str(port),
            "DNE_URL": self.url,
        }
        self.server: subprocess.Popen[bytes] | None = None

    def paste(self, block: Block) -> str:
        if block.is_server:
            self.stop()
            self._serve(block.text)
            return ""
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else None
        done = subprocess.run(
            [*(program or [sys.executable, "-c"]), block.text],
            cwd=self.folder, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode in block.endings, f"{block.text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, text: str) -> None:
        shell = re.sub(r"\bdne-serve\b", "exec dne-serve", text.strip(), count=1)
        with (self.folder / "server.log").open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-euc", shell],
                cwd=self.folder, env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        # A server of an empty store is alive, and ready only once something is learnt.
        up = "/readyz" if (self.folder / "models").exists() else "/healthz"
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + up):
                return
            assert self.server.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.1)
        pytest.fail("the server is not ready after two minutes")

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)

    def wait_until_served(self, version: int) -> None:
        for _ in range(300):
            if self.served() == version:
                return
            time.sleep(0.1)
        pytest.fail(f"version {version} is not served after half a minute")

    def served(self) -> int:
        with urllib.request.urlopen(self.url + "/readyz") as answer:
            return int(json.load(answer)["version"])
