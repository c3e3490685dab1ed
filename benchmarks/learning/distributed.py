"""Learning in two processes beside learning in one: images/s, and whether the versions agree.

Runs `dne-train add-task` on made-up images, with one thread a process, in turns, and reads the
images/s of the phase `learning` from its progress.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.figures import Figure, at_least, at_most, print_figures
from model_store.codec import load_network
from model_store.store.store import Store

SPEED = re.compile(r"^learning: (\d+)/\1,.* (\d+) images/s", re.MULTILINE)
SIZES = {"small": 64, "tiny": 16}
CLASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task to learn again and again."""

    preset: str
    images: int
    epochs: int
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / self.preset


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--json", action="store_true", help="print one JSON object at the end")
    asked.add_argument("--turns", type=int, default=3, help="runs of each kind (3)")
    asked.add_argument("--processes", type=int, default=2, help="processes beside one (2)")
    asked.add_argument("--short", action="store_true", help="the preset tiny only, and little work")
    options = asked.parse_args()
    figures: list[Figure] = []
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dne-distributed-") as folder:
        for work in _works(Path(folder), short=options.short):
            _write_images(work)
            _measure_speed(work, options.turns, options.processes, figures, measured)
        figures.append(_difference(work, options.processes))
    print_figures(figures, measured=measured, as_json=options.json)
    return 0 if all(figure.reached for figure in figures) else 1


def _works(folder: Path, *, short: bool) -> Iterator[Work]:
    if not short:
        yield Work(preset="small", images=320, epochs=2, folder=folder)
    yield Work(preset="tiny", images=320, epochs=2 if short else 12, folder=folder)


def _write_images(work: Work) -> None:
    """Write classes of images that a network can tell apart."""
    draw = np.random.default_rng(0)
    size = SIZES[work.preset]
    for name in range(CLASSES):
        (work.data / str(name)).mkdir(parents=True)
        pattern = draw.integers(0, 200, (size, size, 3))
        for number in range(work.images // CLASSES):
            pixels = pattern + draw.integers(0, 55, (size, size, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(
                work.data / str(name) / f"{number:03}.png"
            )


def _measure_speed(
    work: Work, turns: int, processes: int, figures: list[Figure], measured: dict[str, float]
) -> None:
    speeds: dict[int, list[float]] = {1: [], processes: []}
    for turn in range(turns):
        for count, found in speeds.items():
            store = work.folder / f"{work.preset}-{turn}-{count}"
            found.append(_images_a_second(work, store, "--processes", str(count)))
    medians = {count: statistics.median(found) for count, found in speeds.items()}
    ratios = [two / one for one, two in zip(speeds[1], speeds[processes], strict=True)]
    figures.append(
        at_least(
            f"{processes} processes ÷ one, images/s in learning, {work.preset}",
            statistics.median(ratios),
            0.8 * processes,
        )
    )
    for count, value in medians.items():
        measured[f"images/s, {work.preset}, processes: {count}"] = value
    measured[f"lowest ratio of a turn, {work.preset}"] = min(ratios)
    measured[f"highest ratio of a turn, {work.preset}"] = max(ratios)


def _difference(work: Work, processes: int) -> Figure:
    """Compare the weights after an epoch without augmentation."""
    stores = {count: work.folder / f"agree-{count}" for count in (1, processes)}
    once = ("--epochs", "1", "--augment", "none")
    for count, store in stores.items():
        _images_a_second(work, store, "--processes", str(count), *once)
    one, other = (_weights(store) for store in stores.values())
    largest = max(float(np.abs(one[name] - other[name]).max()) for name in one)
    return at_most("largest difference of a weight after an epoch, in 0.0001", 1e4 * largest, 1)


def _weights(location: Path) -> dict[str, np.ndarray]:
    store = Store.open(str(location))
    network = load_network(store.read_shard, store.manifest(1))
    return {name: one.detach().numpy() for name, one in network.named_parameters()}


def _images_a_second(work: Work, store: Path, *others: str) -> float:
    with _quiet_cache() as cache:
        command = [
            *(sys.executable, "-m", "trainer", "add-task", "--data", str(work.data)),
            *("--store", str(store), "--preset", work.preset, "--epochs", str(work.epochs)),
            *("--threads", "1", "--device", "cpu", "--checkpoint", cache, "--json", *others),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = SPEED.search(done.stderr)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    version = json.loads(done.stdout.splitlines()[-1])["version"]
    assert version == 1
    return float(found[2])


@contextmanager
def _quiet_cache() -> Iterator[str]:
    """Give a run checkpoints of its own: it must not go on from another."""
    with tempfile.TemporaryDirectory(prefix="dne-distributed-") as folder:
        yield folder


if __name__ == "__main__":
    sys.exit(main())
