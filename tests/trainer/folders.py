"""Folders of images, networks and progress small enough for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from tests.machine import know_machine
from trainer.add_task import add_task
from trainer.data.folders import LabelledImages
from trainer.progress import ExpectedPhase, Phase
from trainer.request import AddTask, Effort, NetworkShape
from trainer.versions.outcome import Outcome

SIZE = 8
SHAPE = NetworkShape(image_size=SIZE, patch_size=4, depth=1, head_width=8, heads=2)
SIZES = [
    *("--image-size", "8", "--patch-size", "4", "--depth", "1"),
    *("--head-width", "8", "--heads", "1"),
]


def pixels_of(class_name: str, count: int, *, size: int = SIZE, seed: int = 0) -> np.ndarray:
    """Images that differ from each other, and more from those of other classes. [N, S, S, 3]"""
    kind = int.from_bytes(class_name.encode(), "big") % 2**32
    pattern = np.random.default_rng(kind).integers(0, 200, (size, size, 3))
    noise = np.random.default_rng(seed).integers(0, 55, (count, size, size, 3))
    return (pattern + noise).astype(np.uint8)


def write_classes(
    folder: Path, classes: Sequence[str], *, images: int = 12, size: int = SIZE, seed: int = 0
) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index, pixels in enumerate(pixels_of(name, images, size=size, seed=seed)):
            Image.fromarray(pixels).save(folder / name / f"{index:03}.png")
    return folder


def labelled(counts: Sequence[int]) -> LabelledImages:
    """Images of classes a, b, c …, as many of each as `counts` says."""
    names = tuple("abcdefgh"[: len(counts)])
    return LabelledImages(
        classes=names,
        pixels_NHWC=np.concatenate(
            [pixels_of(name, count) for name, count in zip(names, counts, strict=True)]
        ),
        labels_N=np.repeat(np.arange(len(counts)), counts).astype(np.int64),
    )


def asked(store: Path, data: Path, **others: object) -> AddTask:
    """A request for the smallest run there is, but for what `others` asks."""
    know_machine()
    request: dict[str, object] = {
        "store": str(store),
        "data": data,
        "shape": SHAPE,
        "effort": Effort(epochs=1),
        "augment": "light",
        "device": "cpu",
        "actor": "tests",
    }
    return AddTask(**{**request, **others})  # type: ignore[arg-type]


class Listening:
    """Progress that remembers what it was told, and may stop the run in a named phase,
    when `after` batches of it are done."""

    def __init__(self, *, interrupt_in: str | None = None, after: int = 1) -> None:
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.losses: list[float] = []
        self.expected: list[ExpectedPhase] = []
        self.totals: dict[str, int] = {}
        self._interrupt_in, self._after = interrupt_in, after

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def whole(self, expected: Sequence[ExpectedPhase]) -> Iterator[None]:
        self.expected = list(expected)
        yield

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Phase]:
        self.phases.append(name)
        self.totals[name] = total
        yield _Listened(self, stop_after=self._after if name == self._interrupt_in else None)


class _Listened:
    def __init__(self, listening: Listening, *, stop_after: int | None) -> None:
        self._listening, self._left = listening, stop_after

    def advance(
        self, images: int, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        if loss is not None:
            self._listening.losses.append(loss)
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt


def learn(request: AddTask, *, progress: Listening | None = None) -> Outcome:
    """Learn a task, quietly unless `progress` listens."""
    return add_task(request, progress=progress or Listening())
