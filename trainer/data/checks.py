"""Refuse folders and images that a command cannot use, and say why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from model_store.errors import DataRejected, WrongUsage
from model_store.tables import counted
from trainer.data.folders import (
    MAX_NAMED,
    LabelledImages,
    Listing,
    and_more,
)
from trainer.data.sources.place import folders_of_images, shown
from trainer.progress import Progress

MIN_IMAGES_PER_CLASS = 2
_JUDGE_NAMES = ("val", "valid", "validation", "test")


def refuse_nested(listing: Listing) -> None:
    """Refuse a data folder that has its classes one level deeper, as with train and val folders."""
    if listing.images:
        return
    split = {one.parent.name: one.parent for one in folders_of_images(listing.ignored)}
    if not split:
        return
    if not isinstance(listing.folder, Path):
        raise WrongUsage(
            f"`data={shown(listing.folder)}` has its class folders one level deeper, in "
            f"{_named(list(split))}: pack them without the folders above, or take those as groups "
            "with `hierarchy=folders`"
        )
    names = {name.lower(): folder for name, folder in split.items()}
    to_learn = [name for name in names if name not in _JUDGE_NAMES] or list(names)
    first = names.get("train", names[to_learn[0]])
    use = f"`data={shown(first)}`"
    if "train" not in names and len(to_learn) > 1:
        raise WrongUsage(
            f"`data={shown(listing.folder)}` has its class folders one level deeper, in "
            f"{counted(len(to_learn), 'folder')}: give one of them at a time, as with {use}; if "
            "these are folders of images of one class, use `groups=folders`"
        )
    judge = next((names[name] for name in _JUDGE_NAMES if name in names), None)
    if judge is not None and judge != first:
        use += f" `val_data={shown(judge)}`"
    raise WrongUsage(
        f"`data={shown(listing.folder)}` has its class folders one level deeper: use {use}"
    )


def refuse_small_classes(images_by_class: Mapping[str, int]) -> None:
    small = [name for name, count in images_by_class.items() if count < MIN_IMAGES_PER_CLASS]
    if small:
        each = ", ".join(
            f"{name!r} has {counted(images_by_class[name], 'image')}" for name in small[:MAX_NAMED]
        )
        raise DataRejected(
            f"too few images: {each}{and_more(small)}; a class needs at least "
            f"{MIN_IMAGES_PER_CLASS}"
        )


def refuse_known_classes(listing: Listing, known: Collection[str]) -> None:
    again = [name for name in listing.names if name in known]
    if again:
        raise DataRejected(
            f"the model knows {_named(again)} already; a task brings new classes only, "
            "and `extend` takes more images of classes that are known"
        )


def refuse_new_classes(listing: Listing, known: Collection[str]) -> None:
    new = [name for name in listing.names if name not in known]
    if new:
        raise DataRejected(
            f"the model does not know {_named(new)}{_meant(new, known)}; `extend` takes more "
            "images of known classes only, and without it new classes are learnt as a task"
        )


def refuse_retired_classes(listing: Listing, retired: Collection[str]) -> None:
    again = [name for name in listing.names if name in retired]
    if again:
        raise DataRejected(
            f"{again[0]!r} is the name of a class that was retired; "
            "`dne-store rename-class` gives that one another name, and sets this one free"
        )


def refuse_unknown_classes(listing: Listing, known: Collection[str], *, setting: str) -> None:
    foreign = [name for name in listing.names if name not in known]
    if foreign:
        raise WrongUsage(
            f"`{setting}={shown(listing.folder)}` holds {_named(foreign)}, "
            f"which the model does not know{_meant(foreign, known)}"
        )


def refuse_familiar_classes(listing: Listing, known: Collection[str], *, setting: str) -> None:
    familiar = [name for name in listing.names if name in known]
    if familiar:
        raise WrongUsage(
            f"`{setting}={shown(listing.folder)}` holds {_named(familiar)}, which the model knows"
        )


def refuse_no_images(images: LabelledImages, listing: Listing, *, setting: str, to: str) -> None:
    """Refuse an empty set of images. `to` names their use: "learn from" or "judge by"."""
    if not len(images):
        raise WrongUsage(f"`{setting}={shown(listing.folder)}` holds no images to {to}")


_FEW_DOUBLES = 0.01
"""A smaller share of images in two classes is noise of a large set; a larger one is a mistake."""


def without_doubles(
    images: LabelledImages, *, skip_bad: bool, progress: Progress
) -> LabelledImages:
    """Refuse the same picture in two classes. Leave such pictures out with `skip_bad`, and only
    name them where they are few among many."""
    first: dict[bytes, int] = {}
    doubles: dict[int, int] = {}
    for row, digest in enumerate(images.pictures.digests()):
        other = first.setdefault(digest, row)
        if images.labels_N[other] != images.labels_N[row]:
            doubles[row] = other
    if not doubles:
        return images
    row, other = next(iter(doubles.items()))
    pairs = counted(len(doubles), "picture is", "pictures are")
    said = (
        f"{pairs} in two classes: {images.names[row]} of {images.classes[images.labels_N[row]]!r} "
        f"and {images.names[other]} of {images.classes[images.labels_N[other]]!r} are the same"
    )
    if skip_bad:
        gone = {*doubles, *doubles.values()}
        progress.note(f"left out: {said}")
        stays = [row for row in range(len(images)) if row not in gone]
        return images.take(np.array(stays, dtype=np.int64))
    if len(doubles) < _FEW_DOUBLES * len(images):
        progress.note(f"note: {said}")
        return images
    raise DataRejected(
        f"{said}: take such pictures out of one class, or leave them out with `skip_bad`"
    )


def without_known(
    images: LabelledImages, known: LabelledImages, progress: Progress
) -> LabelledImages:
    """Leave out images that are, pixel for pixel, among `known`: held-out ones stay held out."""
    seen = {pixels.tobytes() for pixels in known.pixels_NHWC}
    fresh = [row for row, pixels in enumerate(images.pixels_NHWC) if pixels.tobytes() not in seen]
    if not fresh:
        raise DataRejected("the model was given all of these images already")
    if len(fresh) < len(images):
        progress.note(
            f"{counted(len(images) - len(fresh), 'image')} left out: the store has them already"
        )
    return images.take(np.array(fresh, dtype=np.int64))


def note_not_judged(listing: Listing, classes: Collection[str], progress: Progress) -> None:
    missing = [name for name in classes if name not in listing.names]
    if missing:
        progress.note(
            f"{shown(listing.folder)} has no images of {_named(missing)}: they will not be judged"
        )


def _meant(names: Sequence[str], known: Collection[str]) -> str:
    """Name a known class that differs from one of `names` in case only."""
    by_case = {name.casefold(): name for name in known}
    for name in names:
        if (meant := by_case.get(name.casefold())) is not None:
            return f" ({meant!r} is known: is {name!r} meant to be that class?)"
    return ""


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MAX_NAMED])) + and_more(names)
