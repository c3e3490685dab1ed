"""Remember in the cache folder what was measured on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import uuid
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_REMEMBERED_BYTES = 1 << 16
NVIDIA = Path("/proc/driver/nvidia")
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors of a remembered file that somebody else has written."""

log = logging.getLogger("model_store.machine")


def machine_digest() -> str:
    """Hash all that a measurement depends on: the digest tells nobody whose machine it is."""
    facts = [platform.machine(), str(os.cpu_count()), os.environ.get("ONEDNN_MAX_CPU_ISA", "")]
    for package in ("torch", "onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            facts.append(f"{package} {version(package)}")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    for path in sorted(NVIDIA.glob("version")) + sorted(NVIDIA.glob("gpus/*/information")):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            facts += [line for line in lines if line.startswith(("NVRM", "Model"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def read_remembered(path: Path) -> Any:
    """Read a remembered file, or raise one of UNREADABLE. The caller checks each value."""
    with path.open("rb") as file:
        return json.loads(file.read(MAX_REMEMBERED_BYTES))


def remember(path: Path, told: Any) -> None:
    """Write a remembered file whole, or log why it cannot be written."""
    unfinished = path.with_name(f"tmp-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(told))
        unfinished.replace(path)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def usable_cores() -> int:
    """Count the cores that this process may run on, where the system says so (not on macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
