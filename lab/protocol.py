"""Cut a data set into tasks: the order of the classes, their images, and the memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lab.dataset import Dataset
from lab.presets import Preset
from model_store.errors import DataRejected
from trainer.data.exemplars import herding_order
from trainer.data.folders import MAX_NAMED, LabelledImages, and_more, join

TRIAL_TEST = 100
"""Training images a class that a trial tests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The tasks of one seed, in their order, with their images."""

    tasks: tuple[tuple[str, ...], ...]
    train: LabelledImages
    test: LabelledImages
    """Both labelled among all classes, in the order of learning."""
    memory: int
    data_digest: str

    @property
    def order_digest(self) -> str:
        """Name the order of the classes and their tasks."""
        return hashlib.sha256(json.dumps(self.tasks).encode()).hexdigest()

    def classes_until(self, task: int) -> tuple[str, ...]:
        """List the classes of the tasks up to this one."""
        return tuple(name for one in self.tasks[: task + 1] for name in one)

    def new_images(self, task: int) -> LabelledImages:
        return _among(self.train, self.tasks[task], self.classes_until(task))

    def images_until(self, task: int) -> LabelledImages:
        """Give all training images of the tasks up to this one."""
        classes = self.classes_until(task)
        return _among(self.train, classes, classes)

    def test_images(self, task: int) -> LabelledImages:
        """Give the test images of one task, labelled among all classes."""
        return _among(self.test, self.tasks[task], self.test.classes)

    def quota(self, task: int) -> int:
        """Return how many exemplars each class keeps after this task."""
        return self.memory // len(self.classes_until(task))


def make_protocol(data: Dataset, preset: Preset, *, seed: int) -> Protocol:
    """Shuffle the classes by the seed, and cut them into tasks."""
    pool = classes_of(data, preset)
    order = tuple(pool[place] for place in np.random.default_rng(seed).permutation(len(pool)))
    if preset.classes is not None and len(order) < preset.classes:
        raise DataRejected(f"the data set has {len(order)} classes; {preset.classes} are needed")
    chosen = order[: preset.classes]
    ends = [preset.first, *range(preset.first + preset.step, len(chosen) + 1, preset.step)]
    if ends[-1] != len(chosen):
        raise DataRejected(
            f"{len(chosen)} classes cannot be cut into {preset.first} and steps of {preset.step}; "
            "are classes missing from the data set?"
        )
    train, test = _parts(data, preset)
    return Protocol(
        tasks=tuple(chosen[begin:end] for begin, end in zip([0, *ends], ends, strict=False)),
        train=_among(train, chosen, chosen),
        test=_among(test, chosen, chosen),
        memory=preset.memory,
        data_digest=data.digest,
    )


def classes_of(data: Dataset, preset: Preset) -> tuple[str, ...]:
    """List the classes that tasks draw from: those of tables, of trials, or all."""
    if not preset.table_classes:
        return data.classes
    order = np.random.default_rng(0).permutation(len(data.classes))
    tables, trials = np.split(order, [preset.table_classes])
    return tuple(data.classes[place] for place in (tables if preset.part == "table" else trials))


def _parts(data: Dataset, preset: Preset) -> tuple[LabelledImages, LabelledImages]:
    """Choose the images of each class, the same for every seed."""
    draw, count = np.random.default_rng(0), preset.images
    by_class = [draw.permutation(data.train.rows_of(name)) for name in data.classes]
    # A trial on classes of its own needs no images of its own.
    whole = preset.part == "table" or preset.table_classes > 0
    asked = (count or 1) if whole else 2 * (count or 1) + TRIAL_TEST
    few = [name for name, rows in zip(data.classes, by_class, strict=True) if len(rows) < asked]
    if few:
        named = ", ".join(map(repr, few[:MAX_NAMED])) + and_more(few)
        raise DataRejected(f"fewer than {asked} training images of {named}")
    if whole:
        return data.train.take(np.concatenate([rows[:count] for rows in by_class])), data.test
    assert count is not None
    test_end = 2 * count + TRIAL_TEST
    return (
        data.train.take(np.concatenate([rows[count : 2 * count] for rows in by_class])),
        data.train.take(np.concatenate([rows[2 * count : test_end] for rows in by_class])),
    )


def _among(
    images: LabelledImages, names: Sequence[str], classes: tuple[str, ...]
) -> LabelledImages:
    """Keep the images of the named classes, labelled among `classes`."""
    places = {images.classes.index(name): classes.index(name) for name in names}
    rows = np.concatenate([images.rows_of(name) for name in names])
    labels = np.array([places[label] for label in images.labels_N[rows].tolist()], dtype=np.int64)
    return LabelledImages(classes=classes, pixels_NHWC=images.pixels_NHWC[rows], labels_N=labels)


@dataclass(slots=True, kw_only=True)
class Memory:
    """The exemplars of each class, best first; at random in the order of the images, which is."""

    herds: bool = True
    kept: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def choose(
        self,
        images: LabelledImages,
        *,
        names: Sequence[str],
        quota: int,
        features: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
    ) -> None:
        """Choose exemplars of new classes, and shorten those of the others."""
        for name in names:
            pixels = images.pixels_NHWC[images.rows_of(name)]
            if self.herds:
                pixels = pixels[herding_order(features(pixels), count=quota)]
            self.kept[name] = pixels
        self.kept = {name: pixels[:quota] for name, pixels in self.kept.items()}

    def images(self, classes: tuple[str, ...]) -> LabelledImages | None:
        """Give all exemplars, labelled among `classes`; None where there are none."""
        sets = [
            LabelledImages(
                classes=classes,
                pixels_NHWC=pixels,
                labels_N=np.full(len(pixels), classes.index(name), dtype=np.int64),
            )
            for name, pixels in self.kept.items()
            if len(pixels)
        ]
        return join(*sets) if sets else None
