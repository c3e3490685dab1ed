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
LONGEST = (
    "e2e/test_console_versions.py",
    "trainer/start/test_start.py",
    "e2e/test_console.py",
    "e2e/test_console_trained.py",
    "dne_serve/test_gpu.py",
    "dne_serve/test_trained_routes.py",
    "e2e/test_s3_story.py",
    "packaging/test_readme.py",
    "trainer/test_checkpoint.py",
    "e2e/test_label_page.py",
    "e2e/test_learn_page.py",
    "trainer/ranks/test_torchrun.py",
    "trainer/inbox/test_from_inbox.py",
    "dne_serve/test_draining.py",
    "lab/test_cell.py",
    "dne_serve/test_backend.py",
    "trainer/test_cli.py",
    "abuse/test_schema.py",
    "e2e/test_pretrained_story.py",
    "trainer/test_add_task.py",
    "dne_serve/test_cli.py",
    "trainer/test_gate.py",
    "faults/test_store_survives.py",
    "model_store/test_folded.py",
    "model_store/test_onnx.py",
    "dne_serve/test_onnx_bank.py",
    "packaging/test_commands.py",
    "dne_serve/test_decoding.py",
    "packaging/test_gpu_marker.py",
    "e2e/test_docs_page.py",
    "faults/test_s3_faults.py",
    "dne_serve/test_limits.py",
    "e2e/test_swaps.py",
    "e2e/test_soak.py",
    "model_store/test_object_storage.py",
)
"""Files of ten seconds and more. Two workers that begin with these end at the same time."""


LONG_FOLDERS = ("e2e", "faults", "abuse")
"""Whole stories, which `make test` leaves to `make test-long`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
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


def _place(item: pytest.Item) -> int:
    name = item.path.relative_to(TESTS).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


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


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Two threads of torch on a busy machine wait for each other and burn what others need, so
    a test that asks for them leaves them to no other."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
