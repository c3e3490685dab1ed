"""A wheel that is built here works in an empty environment: `make test SUITE=wheel`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.packaging.project import COMMANDS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Environment:
    """An environment of its own, with nothing of the sources or of this one on its path."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self.wheel = folder, wheel
        venv.create(folder / "venv", with_pip=True)
        self.home = folder / "somewhere"
        self.home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DNE_")}
        kept.pop("PYTHONPATH", None)
        bin = folder / "venv/bin"
        self.variables = {
            **kept,
            "PATH": f"{bin}{os.pathsep}{kept['PATH']}",
            "DNE_CACHE": str(folder / "cache"),
        }

    def install(self, *what: str) -> None:
        pins = str(ROOT / "constraints.txt")
        done = self.run("python", "-m", "pip", "install", "--quiet", "-c", pins, *what)
        assert done.returncode == 0, done.stderr

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "venv/bin" / command, *arguments],
            cwd=self.home, env=self.variables, capture_output=True, text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def test_the_client_works_alone_without_torch(wheel: Path, tmp_path: Path) -> None:
    alone = Environment(tmp_path, wheel)
    alone.install("--no-deps", str(wheel))
    alone.install("httpx")
    for arguments in (["--help"], ["--version"], ["predict", "--help"]):
        done = alone.run("dne", *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
    (alone.home / "photo.jpg").write_bytes(b"not asked")
    asked = alone.run("dne", "predict", "photo.jpg", "--url", "http://127.0.0.1:9")
    assert asked.returncode == 1
    assert "Traceback" not in asked.stderr
    missing = alone.run("dne", "train", "add-task", "--data", "animals")
    assert missing.returncode == 2
    assert "pip install dne-serve brings it" in missing.stderr
    scripts = alone.run("dne", "completion", "zsh")
    assert scripts.returncode == 2
    assert "pip install dne-serve brings it" in scripts.stderr
    demo = alone.run("dne", "demo")
    assert demo.returncode == 2
    assert "pip install 'dne-serve[demo]' brings it" in demo.stderr
    assert alone.run("python", "-c", "import torch").returncode == 1


def test_the_whole_story_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    whole = Environment(tmp_path, wheel)
    whole.install(f"{wheel}[demo]")
    for command in COMMANDS:
        done = whole.run(command, "--help")
        assert (done.returncode, done.stderr) == (0, ""), command
    nothing = whole.run("dne-store", "list")
    assert nothing.returncode != 0
    assert "Traceback" not in nothing.stderr
    told = whole.run("dne", "demo")
    assert told.returncode == 0, told.stdout + told.stderr
    listed = whole.run("dne", "store", "list", "--store", "demo/models", "--json")
    assert [one["version"] for one in json.loads(listed.stdout)["versions"]] == [1, 2, 3]
    assert {path.name for path in whole.home.iterdir()} == {"demo"}
