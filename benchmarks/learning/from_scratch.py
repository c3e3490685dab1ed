"""How much a network learns from scratch in the same processor time, through the real commands.

The classes are 40 of CIFAR-100, in one order; the tables of `lab/` may use the other 60. Commands
learn in one thread, and processor time is that of the commands that learn, with their starts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, at_least, at_most, print_figures
from dne_client.demo.story import DIGIT_TASKS, write_demo_data

SMALL = ("--image-size", "32", "--patch-size", "8", "--depth", "3", "--heads", "4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Tasks that are learnt one after the other, with the least accuracy of all in %, and the most
    processor seconds: those of the way before ADR 126 to 128."""

    name: str
    tasks: Sequence[Path]
    test: Path
    options: Sequence[str]
    shape: Sequence[str] = ()
    """Options of the first task alone."""
    least: float
    most_s: float


class Cifar:
    """Folders of some classes of the archive, in an order of their own."""

    def __init__(self, archive: Path, place: Path) -> None:
        self._archive, self._place = zipfile.ZipFile(archive), place
        self._names: dict[tuple[str, str], list[str]] = {}
        for name in sorted(self._archive.namelist()):
            parts = name.split("/")
            if len(parts) == 3 and name.endswith(".png"):
                self._names.setdefault((parts[0], parts[1]), []).append(name)
        classes = sorted({name for part, name in self._names if part == "train"})
        kept = np.random.default_rng(0).permutation(len(classes))[60:]
        self._classes = [classes[kept[one]] for one in np.random.default_rng(0).permutation(40)]

    def folder(self, name: str, classes: range, *, part: str, images: int) -> Path:
        folder = self._place / name
        for one in classes:
            label = self._classes[one]
            (folder / label).mkdir(parents=True)
            for file in self._names[part, label][:images]:
                (folder / label / Path(file).name).write_bytes(self._archive.read(file))
        return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one object")
    parser.add_argument("--cifar", type=Path, required=True, help="cifar100.zip")
    parser.add_argument("--only", metavar="WORD", default="", help="trials with this in their name")
    options = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in enumerate(_trials(options.cifar, Path(folder))):
            if options.only in trial.name:
                accuracy, took_s = _measured(trial, Path(folder) / f"models-{number}")
                figures.append(at_least(f"{trial.name}, %", 100 * accuracy, trial.least))
                figures.append(at_most("… processor seconds", took_s, trial.most_s))
    print_figures(figures, measured={}, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def _trials(archive: Path, place: Path) -> Iterable[Trial]:
    cifar = Cifar(archive, place)
    digits = write_demo_data(place / "digits")
    yield Trial(
        name="20 classes × 500 images of 32 pixels",
        tasks=[cifar.folder("twenty", range(20), part="train", images=500)],
        test=cifar.folder("twenty-test", range(20), part="test", images=100),
        options=("--epochs", "4"),
        shape=SMALL,
        least=51.4,
        most_s=100,
    )
    yield Trial(
        name="6 classes × 40 photos",
        tasks=[cifar.folder("six", range(20, 26), part="train", images=40)],
        test=cifar.folder("six-test", range(20, 26), part="test", images=100),
        options=(),
        shape=("--from-scratch",),
        least=59.0,
        most_s=180,
    )
    tasks = (range(26, 30), range(30, 33), range(33, 36))
    yield Trial(
        name="10 classes × 200 in three tasks, 200 exemplars",
        tasks=[
            cifar.folder(f"ten-{classes.start}", classes, part="train", images=200)
            for classes in tasks
        ],
        test=cifar.folder("ten-test", range(26, 36), part="test", images=100),
        options=("--epochs", "20", "--memory", "200"),
        shape=SMALL,
        least=47.1,
        most_s=118,
    )
    yield Trial(
        name="digits in three tasks",
        tasks=[digits.train(task) for task in DIGIT_TASKS],
        test=digits.test,
        options=("--preset", "tiny"),
        least=96.0,
        most_s=60,
    )


def _measured(trial: Trial, store: Path) -> tuple[float, float]:
    """Return the share of test images that are right at the end, and the processor seconds."""
    before = _processor_seconds()
    for number, task in enumerate(trial.tasks):
        shape = () if number else trial.shape
        _train("add-task", "--data", task, "--store", store, "--force", *trial.options, *shape)
    took_s = _processor_seconds() - before
    judged = _train("evaluate", "--data", trial.test, "--store", store)
    return float(judged["accuracy"]["all"]), took_s


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _train(command: str, *arguments: object) -> dict[str, Any]:
    """Return the JSON with which the command ended."""
    done = subprocess.run(
        [Path(sys.executable).with_name("dne-train"), command, *map(str, arguments), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
