"""Read the images of one task: new ones, the parent's exemplars, and held-out ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from model_store.records.manifest import ClassImages, Manifest, Preprocessing
from trainer.base import Base
from trainer.data.checks import (
    note_not_judged,
    refuse_no_images,
    refuse_small_classes,
    refuse_unknown_classes,
    without_known,
)
from trainer.data.exemplars import recall, set_aside
from trainer.data.folders import (
    LabelledImages,
    Listing,
    join,
    list_classes,
    note_ignored,
    read_images,
)
from trainer.progress import Progress
from trainer.request import AddTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The images of a task, all labelled among all classes."""

    for_training: LabelledImages
    """New images, and then the parent's exemplars."""
    new_images: int
    new_held_out: LabelledImages
    """Every held-out image of the classes of this task, or of this extension."""
    judged_by: LabelledImages
    """Images that are never trained on: held-out ones of all classes, or the validation folder."""
    source: Literal["held-out", "validation"]
    retired: tuple[str, ...] = ()
    """Classes that are never answered, and so need no images."""
    learnt_from: Mapping[str, float] = field(default_factory=dict)
    """The number of images that each of the parent's classes was learnt from, where it is known."""

    def forgotten(self, class_name: str) -> float:
        """Return the share of a class's images that is lost since the class was learnt."""
        once, left = self.learnt_from.get(class_name, 0), len(self.for_training.rows_of(class_name))
        return max(0.0, 1 - left / once) if once else 0.0

    @property
    def exemplars(self) -> int:
        return len(self.for_training) - self.new_images


def read_task_data(
    listing: Listing,
    *,
    base: Base,
    request: AddTask,
    classes: tuple[str, ...],
    preprocessing: Preprocessing,
    progress: Progress,
) -> TaskData:
    def remembered(entries: tuple[ClassImages, ...]) -> LabelledImages:
        return recall(entries, classes=classes, read=base.read_shard, preprocessing=preprocessing)

    memory, old_held_out = remembered(base.memory), remembered(base.held_out)
    if not request.extend:
        refuse_small_classes(listing.images_by_class)
    images = read_images(
        listing, preprocessing=preprocessing, skip_bad=request.skip_bad, progress=progress
    )
    if request.extend:
        refuse_no_images(images, listing, option="--data", to="learn from")
        images = without_known(images, join(memory, old_held_out), progress)
    else:
        refuse_small_classes(images.images_by_class)
    already = {entry.class_name: entry.count for entry in base.held_out}
    new, held_out = set_aside(images, seed=request.seed, already=already)
    new, held_out = new.among(classes), held_out.among(classes)
    if request.val_data is None:
        judged_by = join(old_held_out, held_out)
    else:
        judged_by = _validation(
            request.val_data,
            classes=classes,
            retired=base.parent.retired if base.parent else (),
            preprocessing=preprocessing,
            skip_bad=request.skip_bad,
            progress=progress,
        )
    return TaskData(
        for_training=join(new, memory),
        new_images=len(new),
        new_held_out=join(_of_classes(old_held_out, listing.names), held_out),
        judged_by=judged_by,
        source="held-out" if request.val_data is None else "validation",
        retired=base.parent.retired if base.parent else (),
        learnt_from=_learnt_from(base.parent),
    )


def _learnt_from(parent: Manifest | None) -> dict[str, float]:
    """Divide the images of each task's record evenly among the task's classes."""
    counts: dict[str, float] = {}
    for task in parent.tasks if parent else ():
        images = task.training.get("images")
        if isinstance(images, int):
            counts |= dict.fromkeys(task.classes, images / len(task.classes))
    return counts


def _of_classes(images: LabelledImages, names: tuple[str, ...]) -> LabelledImages:
    places = [images.classes.index(name) for name in names]
    return images.take(np.flatnonzero(np.isin(images.labels_N, places)).astype(np.int64))


def _validation(
    folder: Path,
    *,
    classes: tuple[str, ...],
    retired: tuple[str, ...],
    preprocessing: Preprocessing,
    skip_bad: bool,
    progress: Progress,
) -> LabelledImages:
    listing = list_classes(folder, option="--val-data")
    note_ignored(listing, progress)
    known = [name for name in classes if name not in retired]
    listing = listing.spelt_as(classes)
    refuse_unknown_classes(listing, known, option="--val-data")
    images = read_images(listing, preprocessing=preprocessing, skip_bad=skip_bad, progress=progress)
    refuse_no_images(images, listing, option="--val-data", to="judge by")
    note_not_judged(listing, known, progress)
    return images.among(classes)
