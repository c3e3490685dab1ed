"""Make a tiny data set of coloured shapes, and run methods on it in seconds."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from lab.cell import Cell, Run, preprocessing_of
from lab.dataset import Dataset, read_dataset
from lab.presets import PRESETS, Preset
from lab.registry import read_choice
from lab.results import Line
from trainer.progress import ExpectedPhase, Phase, Progress, ProgressLines

SIDE = 16
TINY: Preset = replace(
    PRESETS["mini"],
    classes=6,
    first=2,
    step=2,
    images=None,
    memory=36,
    image_size=SIDE,
    patch_size=4,
    depth=1,
    heads=1,
    resnet_width=4,
    first_epochs=12,
    epochs=8,
    tuning_epochs=2,
    batch_size=24,
    rate=3e-3,
    resnet_rate=0.05,
)
"""Three tasks of two classes each."""

PALETTE = ((230, 40, 40), (40, 200, 60), (50, 80, 230))
NAMES = ("red disc", "green disc", "blue disc", "red bars", "green bars", "blue bars")


def picture(label: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Draw a disc or bars in one of three colours, on noise, at a random place."""
    y, x = np.mgrid[:SIDE, :SIDE]
    if label < 3:
        centre_y, centre_x = draw.uniform(6, 10, size=2)
        inside = (y - centre_y) ** 2 + (x - centre_x) ** 2 < 25
    else:
        inside = (y + draw.integers(4)) % 4 < 2
    pixels = draw.integers(90, 140, size=(SIDE, SIDE, 3))
    pixels[inside] = np.array(PALETTE[label % 3]) + draw.integers(-20, 20, size=3)
    return pixels.clip(0, 255).astype(np.uint8)


def make_zip(path: Path, *, train: int = 24, test: int = 10) -> Path:
    """Write a zip of `train/<class>/*.png` and `test/<class>/*.png`, always the same."""
    draw = np.random.default_rng(7)
    with zipfile.ZipFile(path, "w") as archive:
        for part, count in (("train", train), ("test", test)):
            for label, name in enumerate(NAMES):
                for number in range(count):
                    archive.writestr(f"{part}/{name}/{number:03}.png", _png(picture(label, draw)))
    return path


def _png(pixels: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="png")
    return stream.getvalue()


def tiny_data(folder: Path) -> Dataset:
    path = folder / "tiny.zip"
    return read_dataset(
        path if path.exists() else make_zip(path), preprocessing=preprocessing_of(TINY)
    )


class Killed(Exception):
    """Stand for a signal that ends a process."""


@dataclass
class Dying:
    """Progress that ends the run in the middle of a phase, after `phases` others."""

    phases: int

    def note(self, text: str) -> None:
        """Say nothing."""

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        yield

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        self.phases -= 1
        yield _DyingPhase(left=total // 2 if self.phases < 0 else total)


@dataclass
class _DyingPhase:
    left: int

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self.left -= images
        if self.left < 0:
            raise Killed


def tiny_run(
    choice: str,
    folder: Path,
    *,
    preset: Preset = TINY,
    seed: int = 0,
    progress: Progress | None = None,
) -> Run:
    """Prepare a run with its checkpoints, bases and results in `folder`."""
    cell = Cell(
        choice=read_choice(choice), preset_name="tiny", setting="", preset=preset, seed=seed
    )
    return Run(
        cell,
        tiny_data(folder),
        out=folder / "out.jsonl",
        progress=progress or ProgressLines(io.StringIO()),
        folder=folder / "lab",
    )


def run_cell(
    choice: str, folder: Path, *, preset: Preset = TINY, seed: int = 0
) -> tuple[Run, list[Line]]:
    """Run a method through all tasks. Return the run and its lines."""
    run = tiny_run(choice, folder, preset=preset, seed=seed)
    run.go()
    return run, run.lines


def run_killed(choice: str, folder: Path, *, phases: int, preset: Preset = TINY) -> Run:
    """Kill a run in the middle of a phase, after `phases` others, then let it go on."""
    with suppress(Killed):
        tiny_run(choice, folder, preset=preset, progress=Dying(phases)).go()
        raise AssertionError("the run has fewer phases")
    run = tiny_run(choice, folder, preset=preset)
    run.go()
    assert any(line.resumed for line in run.lines)
    return run


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
