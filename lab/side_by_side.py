"""Run cells in processes of their own, so that each core learns one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lab.cell import Cell

NICE = "10"
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    cell: Cell
    base: Path | None
    """The file of the first task, if other cells share it."""

    def must_wait_for(self, other: Job) -> bool:
        """Return whether the other job is learning the first task of this one."""
        return self.base is not None and self.base == other.base and not self.base.exists()


def run_side_by_side(jobs: Sequence[Job], *, data: Path, out: Path, at_once: int) -> list[Cell]:
    """Run all jobs, `at_once` at a time. Return the cells that failed.

    Ctrl-C and SIGTERM end the jobs that run; the same command goes on after their last epochs.
    """
    waiting, running, failed = list(jobs), dict[Job, subprocess.Popen[bytes]](), []
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            for job in [one for one, process in running.items() if process.poll() is not None]:
                if running.pop(job).returncode:
                    failed.append(job.cell)
            ready = _ready(waiting, list(running)) if len(running) < at_once else None
            if ready is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                continue
            waiting.remove(ready)
            running[ready] = _start(ready.cell, data=data, out=out)
    finally:
        _end(list(running.values()))
        signal.signal(signal.SIGTERM, before)
    return failed


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes; nothing is lost, for a cell keeps its state in files that are replaced."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(waiting: Sequence[Job], running: Sequence[Job]) -> Job | None:
    """Choose the first job that can begin: one that waits would leave a core idle."""
    free = (one for one in waiting if not any(one.must_wait_for(other) for other in running))
    return next(free, None)


def _start(cell: Cell, *, data: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [
        "nice", "-n", NICE, sys.executable, "-m", "lab", "compare", str(cell.choice),
        "--data", str(data), "--out", str(out), "--preset", cell.preset_name,
        "--seeds", str(cell.seed), "--set", *filter(None, cell.setting.split(",")),
    ]  # fmt: skip
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
