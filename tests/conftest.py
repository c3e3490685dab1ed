"""What all tests share: the same surroundings on every machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.campaigns import show_campaigns
from tests.machine import compute_without_amx, run_folder, use_memory_for_files
from tests.s3_server import moto, s3_location, seaweedfs  # noqa: F401 – fixtures for all
from tests.trained_store import allow_for_the_making, trained_copy, trained_store  # noqa: F401 – fixtures for all

# Before torch is imported: tiny networks lose more time to a thread pool than they win.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
# One authority, whose key nobody has: reading those of the world takes every HTTP client 30 ms.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("nobody.pem"))
os.environ.pop("SSL_CERT_DIR", None)
use_memory_for_files()
compute_without_amx()

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

NO_GPU = "there is no CUDA device"
TESTS = Path(__file__).parent

LONG_FOLDERS = ("e2e", "faults", "abuse")
"""Whole stories, which `make test` leaves to `make test SUITE=long`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in LONG_FOLDERS:
            item.add_marker(pytest.mark.long)
    allow_for_the_making(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # and torch, which takes seconds, need not be imported
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    show_campaigns(terminalreporter)
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("gpu" in report.keywords for report in skipped)
    if count:
        told = f"{count} tests marked gpu were not run: {NO_GPU}"
        terminalreporter.write_line(told, yellow=True, bold=True)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A developer's own DNE_STORE must neither change a test nor be changed by one."""
    for name in [name for name in os.environ if name.startswith("DNE_")]:
        monkeypatch.delenv(name)
    # One for all processes of a run: what a machine can do is found out once.
    monkeypatch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the key of the caches outside the home folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(run_folder(tmp_path_factory) / "state"))
        yield


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Two threads of torch on a busy machine wait for each other and burn what others need, so
    a test that asks for them leaves them to no other."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
