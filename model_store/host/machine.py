"""Remember in the cache folder what was measured on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from model_store.errors import NotPrivate
from model_store.host.private import private_folder, read_private, replace_file

MAX_REMEMBERED_BYTES = 1 << 16
NVIDIA = Path("/proc/driver/nvidia")
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError, NotPrivate)
"""Errors of a remembered file that somebody else has written."""

log = logging.getLogger("model_store.host.machine")


def machine_digest() -> str:
    """Hash all that a measurement depends on. The digest does not identify the machine's owner."""
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
    return json.loads(read_private(path, max_bytes=MAX_REMEMBERED_BYTES))


def remember(path: Path, told: Any) -> None:
    """Write a remembered file whole, or log why it cannot be written."""
    try:
        if not path.parent.exists():
            private_folder(path.parent)
        replace_file(path, json.dumps(told).encode())
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def usable_cores() -> int:
    """Count the cores that this process may run on, where the system says so (not on macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
