"""Where the project's files are, and what its commands say about themselves."""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dne_serve", "dne_client", "trainer", "model_store")
MAINS = {
    "dne-train": "trainer.cli",
    "dne-store": "model_store.cli.main",
    "dne-serve": "dne_serve.cli",
    "dne": "dne_client.__main__",
}
COMMANDS = tuple(MAINS)


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def tracked_files() -> list[Path]:
    """What git would hand to a newcomer: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command of the environment that runs the tests."""
    found = shutil.which(command[0], path=str(Path(sys.executable).parent))
    assert found is not None, f"{command[0]} is not installed beside {sys.executable}"
    return subprocess.run([found, *command[1:]], cwd=cwd, capture_output=True, text=True)


def tool(name: str) -> str:
    """Find a tool of deploy/tools.lock, or skip the test. `make test SUITE=deploy` installs it."""
    folders = f"{ROOT / '.tools/bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=folders)
    if found is None:
        pytest.skip(
            f"{name.upper()} WAS NOT TRIED: not installed; `make test SUITE=deploy` does it"
        )
    return found


@cache
def help_of(command: str, *path: str) -> str:
    """Ask a command for its help in a process of its own, and its subcommands in this process."""
    if not path:
        done = run(command, "--help")
        assert done.returncode == 0, f"{command} --help: {done.stderr}"
        return done.stdout
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        importlib.import_module(MAINS[command]).main([*path, "--help"])
    return printed.getvalue()


@cache
def subcommands(*command: str) -> tuple[str, ...]:
    """Those that its help lists, one a line; none for a command that has none."""
    return tuple(re.findall(r"^ {4}([a-z][a-z-]*)(?: |$)", help_of(*command), re.MULTILINE))


def options(*command: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_of(*command)))
