"""Use this machine well: try each precision once a run, keep files in memory, outlive AMX."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from model_store.precision import REMEMBERED, try_out
from model_store.records.quality import Reduced
from model_store.store.cache import cache_folder

LIMIT, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
MEMORY = Path("/dev/shm")
ROOM_BYTES = 8 << 30
_KNOWN: set[Path] = set()
"""Files in which this process has found all trials: looking takes longer than a tiny batch."""


def use_memory_for_files() -> None:
    """Let pytest keep its files in memory where there is plenty: a disk takes its time to sync."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def compute_without_amx() -> None:
    """Keep AMX instructions out of this process: some virtual machines advertise them and kill it.

    oneDNN reads the limit once, at its first product. Child processes have no limit, so the
    product's own trial of a precision meets the machine as it is.
    """
    if LIMIT in os.environ:
        return
    import torch  # not before the caller has limited its threads

    os.environ[LIMIT] = WITHOUT_AMX
    square = torch.ones(64, 64, dtype=torch.bfloat16)
    assert (square @ square)[0, 0] == 64
    del os.environ[LIMIT]


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Name the folder that all processes of a run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def know_machine() -> Path:
    """Try each precision that $DNE_CACHE does not remember. A trial takes seconds."""
    cache = cache_folder()
    if (cache / REMEMBERED) in _KNOWN and (cache / REMEMBERED).exists():
        return cache / REMEMBERED
    cache.parent.mkdir(parents=True, exist_ok=True)
    with alone(cache.with_suffix(".lock")):
        for precision in get_args(Reduced):
            try_out(precision)
    _KNOWN.add(cache / REMEMBERED)
    return cache / REMEMBERED


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let one process in at a time. The system takes the lock from a holder that is killed."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
