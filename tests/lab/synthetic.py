"""Data sets and results small enough for tests."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from PIL import Image

from lab.results import Line
from tests.trainer.folders import pixels_of

SIZE = 8
CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox")
SETTINGS = ("image_size=8", "patch_size=4", "batch_size=24", "first_epochs=2", "epochs=2")
"""Changes of the preset `mini` that let a cell run in a second."""

LINE = Line(
    method="dne",
    variant="",
    preset="mini",
    setting="",
    seed=0,
    order_digest="order 0",
    data_digest="data",
    task=0,
    classes=2,
    accuracies=(0.5,),
    accuracy=0.5,
    parameters=1_000_000,
    flop=2_000_000_000,
    served_flop=None,
    passes=1,
    cpu_s=60.0,
    shared_base=False,
    resumed=False,
    commit="abc",
)


def course(*accuracies: tuple[float, ...], first_task: int = 0, **others: object) -> list[Line]:
    """Make the lines of a cell from the accuracies by task; tasks have two classes."""
    lines = []
    for task, each in enumerate(accuracies, start=first_task):
        line = replace(
            LINE, task=task, classes=2 * task + 2, accuracies=each, accuracy=sum(each) / len(each)
        )
        lines.append(replace(line, **others))  # type: ignore[arg-type]
    return lines


def png(class_name: str, *, seed: int, size: int = SIZE) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels_of(class_name, 1, size=size, seed=seed)[0]).save(file, "PNG")
    return file.getvalue()


def write_zip(
    path: Path,
    *,
    classes: Iterable[str] = CLASSES,
    train: int = 20,
    test: int = 5,
    size: int = SIZE,
) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in classes:
            for part, count, begin in (("train", train, 0), ("test", test, 1000)):
                for place in range(count):
                    content = png(name, seed=begin + place, size=size)
                    archive.writestr(f"{part}/{name}/{place:03}.png", content)
    return path
