"""Run a cell in children that are killed after a few writes each, until one of them ends.

python -m tests.lab.killed DATA OUT FOLDER WRITES…: print how many were killed. One child after the
other lives for as many writes as WRITES say; the numbers come again when all are used.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab import results
from lab.cell import Cell, Run, preprocessing_of
from lab.dataset import Dataset, read_dataset
from lab.presets import PRESETS, changed
from lab.registry import read_choice
from tests.lab.synthetic import SETTINGS
from tests.trainer.folders import Listening

MOST = 200


def tiny_cell(method: str = "dne", *, seed: int = 0) -> Cell:
    setting = ",".join(sorted(SETTINGS))
    return Cell(
        choice=read_choice(method),
        preset_name="mini",
        setting=setting,
        preset=changed(PRESETS["mini"], setting),
        seed=seed,
    )


def tiny_data(path: Path) -> Dataset:
    return read_dataset(path, preprocessing=preprocessing_of(tiny_cell().preset))


def go(data: Dataset, *, out: Path, folder: Path, method: str = "dne") -> Listening:
    """Run a cell, and return all that it told."""
    told = Listening()
    Run(tiny_cell(method), data, out=out, folder=folder, progress=told).go()
    return told


class _Killer:
    """Kill this process after so many calls that change files for good."""

    def __init__(self, *, after: int) -> None:
        self._left = after
        os.replace = self._counted(os.replace)
        os.unlink = self._counted(os.unlink)
        results.append = self._counted(results.append)

    def _counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            write(*given, **named)
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

        return counted


def main(data_path: str, out: str, folder: str, *writes: str) -> None:
    torch.set_num_threads(1)
    data = tiny_data(Path(data_path))
    with TemporaryDirectory() as scratch:  # so that children need not import torch's rarer parts
        go(data, out=Path(scratch, "lines.jsonl"), folder=Path(scratch))
    for killed in range(MOST):
        child = os.fork()
        if not child:
            # One write may be half of a step (a file, and the record that names it): if every
            # child died after one, they would never get further.
            _Killer(after=int(writes[killed % len(writes)]))
            go(data, out=Path(out), folder=Path(folder))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(killed)
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit(f"{MOST} runs got no further")


if __name__ == "__main__":
    main(*sys.argv[1:])
