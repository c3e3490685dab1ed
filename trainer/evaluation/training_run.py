"""Describe a run of the trainer for the record of a version: command, seed, time, machine."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from model_store.host.machine import usable_cores
from model_store.records.quality import TrainingRun
from trainer.request import Learning

MAX_TEXT = 2000
"""Characters that a record takes."""
NOT_TOLD = ("--store", "--checkpoint", "--sign", "--trust", "--reason", "--ray-address")
"""Options that say where things are kept, or that a channel record has."""


def command_of(arguments: Sequence[str]) -> str:
    """Write a command line for the record: of folders, files and addresses the last name only."""
    told = " ".join(shlex.quote(part) for part in _told(arguments))
    return f"dne-train {told}"[:MAX_TEXT]


def _told(arguments: Sequence[str]) -> Iterator[str]:
    left = iter(arguments)
    for part in left:
        name, equals, value = part.partition("=")
        if not part.startswith("--"):
            yield _last_name(part)
        elif any(one.startswith(name) for one in NOT_TOLD):  # argparse takes a beginning too
            if not equals:
                next(left, None)
        else:
            yield f"{name}={_last_name(value)}" if equals else part


def _last_name(value: str) -> str:
    """Shorten a path or an address, of which a query may hold a key."""
    if "/" not in value and "\\" not in value:
        return value
    bare = value.partition("?")[0] if "://" in value else value
    return re.split(r"[/\\]", bare.rstrip("/\\"))[-1] or "."


def training_run(
    request: Learning, *, seconds: float, device: str, latency_ms: float | None
) -> TrainingRun:
    return TrainingRun(
        command=request.command,
        seed=request.seed,
        seconds=round(seconds, 3),
        machine=_machine(device),
        latency_ms=latency_ms,
    )


def _machine(device: str) -> str:
    """Name the processor, never the host or its user."""
    processor = platform.machine() or "unknown processor"
    with suppress(OSError):  # only Linux has the file
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = found[1].strip() if found else processor
    cores = usable_cores()
    return f"{processor}, {cores} core{'' if cores == 1 else 's'}, {device}"[:MAX_TEXT]
