"""Read the images of one task: new ones, the parent's exemplars, and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from model_store.errors import CorrectionRefused, DataRejected
from model_store.loop.corrections import ImageMove
from model_store.records.hierarchy import Hierarchy
from model_store.records.manifest import ClassImages, ClassTokens, Preprocessing, Scalar
from trainer.base import Base
from trainer.data.checks import (
    note_not_judged,
    refuse_no_images,
    refuse_small_classes,
    refuse_unknown_classes,
    without_doubles,
    without_known,
)
from trainer.data.exemplars import recall, set_aside
from trainer.data.folders import (
    LabelledImages,
    Listing,
    join,
    note_ignored,
    read_images,
)
from trainer.data.groups import LIKE, Groups, numbers_of, with_groups
from trainer.progress import Progress
from trainer.request import AddTask, Learning


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptStatistics:
    """Statistics of the tokens of one class, as they are in the store."""

    entry: ClassTokens
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The images that stand on one side where some are held out."""

    together: int
    """Images that are in a group with others."""
    groups: int
    """Groups of at least two images."""
    said: bool
    """Whether the data says groups."""

    @classmethod
    def of(cls, images: LabelledImages, groups_N: Groups) -> Split:
        _, sizes = np.unique(groups_N, return_counts=True)
        several = sizes[sizes > 1]
        said = any(group and not group.startswith(LIKE) for group in images.groups)
        return cls(together=int(several.sum()), groups=len(several), said=said)

    def figures(self) -> dict[str, Scalar]:
        """Return the figures for the record of a version."""
        how = "groups of the data" if self.said else "near duplicates"
        return {
            "split_by": how if self.groups else "single images",
            "split_groups": self.groups,
            "split_together": self.together,
        }


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
    statistics: tuple[_KeptStatistics, ...] = ()
    """The parent's, of exemplars and of images that were dropped."""
    hierarchy: Hierarchy | None = None
    """The groups above the classes."""
    digest: str | None = None
    """The digest of the images of the folder, as they are read; None without a folder."""
    split: Split | None = None
    """How the new images were split; None without new images."""
    gone: LabelledImages | None = None
    """Images that the statistics of their class have counted, and that were taken out of it."""
    corrected: int = 0
    """Kept images that were moved to another class or taken out."""

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
    hierarchy: Hierarchy | None = None,
) -> TaskData:
    def remembered(entries: tuple[ClassImages, ...]) -> LabelledImages:
        return recall(entries, classes=classes, read=base.read_shard, preprocessing=preprocessing)

    memory, old_held_out = remembered(base.memory), remembered(base.held_out)
    if not request.extend:
        refuse_small_classes(listing.images_by_class)
    images = read_images(
        listing, preprocessing=preprocessing, skip_bad=request.skip_bad, progress=progress
    )
    images = without_doubles(images, skip_bad=request.skip_bad, progress=progress)
    if request.extend:
        refuse_no_images(images, listing, setting="data", to="learn from")
        images = without_known(images, join(memory, old_held_out), progress)
    else:
        refuse_small_classes(images.images_by_class)
    already = {entry.class_name: entry.count for entry in base.held_out}
    images = with_groups(images)
    groups_N = numbers_of(images)
    new, held_out = set_aside(images, seed=request.seed, groups_N=groups_N, already=already)
    new, held_out = new.among(classes), held_out.among(classes)
    judge = listing.judge
    if judge is None:
        judged_by = join(old_held_out, held_out)
    else:
        judged_by = _validation(
            judge,
            kept=old_held_out if request.val_data is None else None,
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
        source="held-out" if judge is None else "validation",
        retired=base.parent.retired if base.parent else (),
        statistics=_kept_statistics(base),
        hierarchy=hierarchy,
        digest=_digest(images),
        split=Split.of(images, groups_N),
    )


def read_again(listing: Listing, *, base: Base, request: AddTask, progress: Progress) -> TaskData:
    """Read the folder of a task that the parent has, with what the store keeps of other classes."""
    assert base.parent is not None
    return read_task_data(
        listing,
        base=base.without_images_of(listing.names),
        request=request,
        classes=base.parent.spec.classes,
        preprocessing=base.parent.preprocessing,
        progress=progress,
        hierarchy=base.parent.hierarchy,
    )


def recall_task_data(
    base: Base,
    *,
    names: tuple[str, ...],
    judge: Listing | None,
    request: Learning,
    progress: Progress,
) -> TaskData:
    """Take the images of all classes from the store; those of `names` count as new."""
    assert base.parent is not None
    classes, preprocessing = base.parent.spec.classes, base.parent.preprocessing
    memory, held_out = (
        recall(entries, classes=classes, read=base.read_shard, preprocessing=preprocessing)
        for entries in (base.memory, base.held_out)
    )
    missing = [
        name for name in names if name not in base.parent.retired and not len(memory.rows_of(name))
    ]
    if missing:
        raise DataRejected(
            f"the store keeps no images of {', '.join(map(repr, missing[:20]))} to learn an expert "
            "from"
        )
    judged_by = held_out
    if judge is not None:
        judged_by = _validation(
            judge,
            classes=classes,
            retired=base.parent.retired,
            preprocessing=preprocessing,
            skip_bad=request.skip_bad,
            progress=progress,
        )
    return TaskData(
        for_training=memory,
        new_images=sum(len(memory.rows_of(name)) for name in names),
        new_held_out=held_out,
        judged_by=judged_by,
        source="held-out" if judge is None else "validation",
        retired=base.parent.retired,
        statistics=_kept_statistics(base),
        hierarchy=base.parent.hierarchy,
    )


def corrected_task_data(
    base: Base, moves: Sequence[ImageMove], *, request: Learning, progress: Progress
) -> TaskData:
    """Take the images of all classes from the store, with those that were corrected in their right
    classes. Images that have come to a class count as new."""
    data = recall_task_data(base, names=(), judge=None, request=request, progress=progress)
    by_place = {(move.record.image, move.label): move for move in moves}
    learnt = _corrected(data.for_training, by_place)
    judged = _corrected(data.judged_by, by_place)
    for name in {move.label for move in moves}:
        if not any(len(part.rows_of(name)) for part in (learnt.left, learnt.moved)):
            raise CorrectionRefused(
                f"the corrections take the last image to learn from away from {name!r}: take one "
                "of them back, or `dne-store retire-class` takes the class away"
            )
    return replace(
        data,
        for_training=join(learnt.moved, learnt.left),
        new_images=len(learnt.moved),
        new_held_out=join(judged.moved, judged.left),
        judged_by=join(judged.moved, judged.left),
        gone=learnt.gone,
        corrected=len(learnt.gone) + len(judged.gone),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corrected:
    """Images that stay where they are, those that have come to another class, labelled so, and all
    that have left a class, labelled as before."""

    left: LabelledImages
    moved: LabelledImages
    gone: LabelledImages


def _corrected(images: LabelledImages, moves: Mapping[tuple[str, str], ImageMove]) -> _Corrected:
    files = (images.pictures.encoded(row) for row in range(len(images)))
    places = [
        (hashlib.sha256(file).hexdigest(), images.classes[label])
        for file, label in zip(files, images.labels_N, strict=True)
    ]
    goals = {row: moves[place].record.to for row, place in enumerate(places) if place in moves}
    there = {place for row, place in enumerate(places) if row not in goals}
    moved: list[int] = []
    for row, goal in goals.items():
        if goal is not None and (places[row][0], goal) not in there:
            there.add((places[row][0], goal))  # a copy comes once
            moved.append(row)
    stays = [row for row in range(len(images)) if row not in goals]
    came = images.take(np.array(moved, dtype=np.int64))
    labels = [images.classes.index(str(goals[row])) for row in moved]
    return _Corrected(
        left=images.take(np.array(stays, dtype=np.int64)),
        moved=came.labelled(np.array(labels, dtype=np.int64)),
        gone=images.take(np.array(list(goals), dtype=np.int64)),
    )


def _digest(images: LabelledImages) -> str:
    """Digest pixels and classes, in the order of the folder."""
    digest = hashlib.sha256("\n".join(images.classes).encode())
    digest.update(images.labels_N.tobytes())
    digest.update(np.ascontiguousarray(images.pixels_NHWC).data)
    return digest.hexdigest()


def _kept_statistics(base: Base) -> tuple[_KeptStatistics, ...]:
    return tuple(
        _KeptStatistics(entry=entry, data=base.read_shard(entry.shard)) for entry in base.statistics
    )


def _of_classes(images: LabelledImages, names: tuple[str, ...]) -> LabelledImages:
    places = [images.classes.index(name) for name in names]
    return images.take(np.flatnonzero(np.isin(images.labels_N, places)).astype(np.int64))


def _validation(
    listing: Listing,
    *,
    kept: LabelledImages | None = None,
    classes: tuple[str, ...],
    retired: tuple[str, ...],
    preprocessing: Preprocessing,
    skip_bad: bool,
    progress: Progress,
) -> LabelledImages:
    """Read the images to judge by. `kept` are images of other classes: a part of the new data has
    none of the old classes, and the gate has to judge those too."""
    setting = "val_data" if kept is None else "data"
    note_ignored(listing, progress)
    known = [name for name in classes if name not in retired]
    listing = listing.spelt_as(classes)
    refuse_unknown_classes(listing, known, setting=setting)
    images = read_images(listing, preprocessing=preprocessing, skip_bad=skip_bad, progress=progress)
    refuse_no_images(images, listing, setting=setting, to="judge by")
    judged_by = images.among(classes)
    if kept is not None:
        others = tuple(name for name in classes if name not in listing.names)
        judged_by = join(_of_classes(kept, others), judged_by)
    lacking = [name for name in known if not len(judged_by.rows_of(name))]
    note_not_judged(listing, lacking, progress)
    return judged_by
