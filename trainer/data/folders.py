"""List folders of images, one folder a class, and read images into one array of pixels.

Name every entry that is ignored and every file that cannot be read. Know nothing of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DataRejected, ImageRejected, WrongUsage
from model_store.names import new_class_name, spelt_among
from model_store.preprocess import read_pixels
from model_store.records.manifest import Preprocessing
from model_store.tables import counted
from trainer.data.pictures import Pictures, in_threads
from trainer.data.sources.limits import read_file
from trainer.data.sources.place import (
    IMAGE_SUFFIXES,
    ImageSource,
    Place,
    entries,
    folders_of_images,
    images_in,
    is_stray,
    shown,
    shown_in,
)
from trainer.progress import Progress

MAX_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolder:
    name: str
    files: tuple[ImageSource, ...]
    groups: tuple[str, ...] = ()
    """The group of each file, or nothing where the data says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The contents of a source: classes by name, and stray entries that are not images."""

    folder: Place
    """The folder, the archive or the table."""
    classes: tuple[ClassFolder, ...]
    ignored: tuple[Place, ...] = ()
    parents: Mapping[str, str] = field(default_factory=dict)
    """The groups above the classes, where folders in folders tell them."""
    judge: Listing | None = None
    """The part of the source to judge by, where it has one."""
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(class_folder.name for class_folder in self.classes)

    @property
    def images_by_class(self) -> dict[str, int]:
        return {class_folder.name: len(class_folder.files) for class_folder in self.classes}

    @property
    def images(self) -> int:
        return sum(len(class_folder.files) for class_folder in self.classes)

    def spelt_as(self, known: Collection[str]) -> Listing:
        """Give every class the spelling that its name has among `known`, if it is there."""
        classes = (
            replace(class_folder, name=spelt_among(class_folder.name, known) or class_folder.name)
            for class_folder in self.classes
        )
        return replace(self, classes=tuple(classes))


class LabelledImages:
    """Images and the class of each, as an index into `classes`.

    Images that the store keeps are decoded when their pixels are asked for. A name tells people
    which image is meant; it may be empty, and two images may have the same. Images of a class with
    the same group belong together, and stand on one side of every split; it may be empty too.
    """

    __slots__ = ("classes", "groups", "labels_N", "names", "pictures")

    def __init__(
        self,
        *,
        classes: tuple[str, ...],
        pixels_NHWC: NDArray[np.uint8] | Pictures,
        labels_N: NDArray[np.int64],
        names: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        self.classes, self.labels_N = classes, labels_N
        self.groups: tuple[str, ...] = (
            tuple(groups) if groups is not None else ("",) * len(labels_N)
        )
        self.names: tuple[str, ...] = tuple(names) if names is not None else ("",) * len(labels_N)
        self.pictures: Pictures = (
            pixels_NHWC if isinstance(pixels_NHWC, Pictures) else Pictures.of(pixels_NHWC)
        )

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def pixels_NHWC(self) -> NDArray[np.uint8]:
        return self.pictures.pixels_NHWC

    def take(self, rows: NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(
            classes=self.classes,
            pixels_NHWC=self.pictures.take(rows),
            labels_N=self.labels_N[rows],
            names=[self.names[row] for row in rows],
            groups=[self.groups[row] for row in rows],
        )

    def grouped(self, groups: Sequence[str]) -> LabelledImages:
        """Give the same images these groups."""
        return LabelledImages(
            classes=self.classes,
            pixels_NHWC=self.pictures,
            labels_N=self.labels_N,
            names=self.names,
            groups=groups,
        )

    def labelled(self, labels_N: NDArray[np.int64]) -> LabelledImages:
        """Give the same images these labels."""
        return LabelledImages(
            classes=self.classes,
            pixels_NHWC=self.pictures,
            labels_N=labels_N,
            names=self.names,
            groups=self.groups,
        )

    def rows_of(self, class_name: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.labels_N == self.classes.index(class_name)).astype(np.int64)

    @property
    def images_by_class(self) -> dict[str, int]:
        return {name: len(self.rows_of(name)) for name in self.classes}

    def among(self, classes: tuple[str, ...]) -> LabelledImages:
        """Label the same images as indices into a longer or reordered list of classes."""
        places = np.array([classes.index(name) for name in self.classes], dtype=np.int64)
        return LabelledImages(
            classes=classes,
            pixels_NHWC=self.pictures,
            labels_N=places[self.labels_N],
            names=self.names,
            groups=self.groups,
        )


def join(first: LabelledImages, *others: LabelledImages) -> LabelledImages:
    """Join sets of images that are labelled among the same classes."""
    return LabelledImages(
        classes=first.classes,
        pixels_NHWC=first.pictures.joined([other.pictures for other in others]),
        labels_N=np.concatenate([one.labels_N for one in (first, *others)]),
        names=[name for one in (first, *others) for name in one.names],
        groups=[group for one in (first, *others) for group in one.groups],
    )


def list_classes(folder: Place, *, setting: str = "data", with_groups: bool = False) -> Listing:
    """List the class folders in `folder` by name. Raise WrongUsage where there are none.

    `with_groups`: the images of a folder inside a class folder belong together.
    """
    if not folder.exists():
        raise WrongUsage(f"`{setting}={shown(folder)}` does not exist")
    if not folder.is_dir():
        raise WrongUsage(f"`{setting}={shown(folder)}` is not a folder")
    found = entries(folder)
    if not found:
        raise WrongUsage(
            f"`{setting}={shown(folder)}` is empty; it needs one folder of images a class"
        )
    strays: list[Place] = []
    folders: list[Place] = []
    for entry in found:
        (strays if is_stray(entry) or not entry.is_dir() else folders).append(entry)
    if not folders:
        raise WrongUsage(
            f"`{setting}={shown(folder)}` has no class folders; put the images of each class into "
            "a folder named after the class"
        )
    classes = []
    named: dict[str, Place] = {}
    for one in folders:
        files, ignored = images_in(one)
        name = new_class_name(one.name)
        _refuse_twice(one, named.setdefault(name, one))
        inner = folders_of_images(ignored) if with_groups else []
        listed = ClassFolder(name=name, files=files)
        if inner:
            listed, ignored = _with_inner(listed, inner, ignored)
        classes.append(listed)
        strays += ignored
    return Listing(folder=folder, classes=tuple(classes), ignored=tuple(strays))


def _with_inner(
    found: ClassFolder, inner: Sequence[Place], ignored: Sequence[Place]
) -> tuple[ClassFolder, list[Place]]:
    """Add the images of inner folders to a class, each folder a group."""
    files, groups = list(found.files), [""] * len(found.files)
    strays = [entry for entry in ignored if entry not in inner]
    for folder in inner:
        images, others = images_in(folder)
        files += images
        groups += [folder.name] * len(images)
        strays += others
    return replace(found, files=tuple(files), groups=tuple(groups)), strays


def _refuse_twice(folder: Place, first: Place) -> None:
    """Refuse two spellings of one name, with escapes: a screen shows both names alike."""
    if folder != first:
        raise DataRejected(
            f"{shown(first)} ({first.name!a}) and {shown(folder)} ({folder.name!a}) "
            "are two spellings of one class name; put their images into one folder"
        )


def list_loose(folder: Place, *, setting: str) -> Listing:
    """List all images in `folder` and in its folders, whatever their names are."""
    if not folder.is_dir():
        return list_classes(folder, setting=setting)  # which names the fault
    here, others = images_in(folder)
    loose = ClassFolder(name="", files=here)
    if not any(entry.is_dir() and not is_stray(entry) for entry in others):
        return Listing(folder=folder, classes=(loose,), ignored=tuple(others))
    listing = list_classes(folder, setting=setting)
    images = set(here)
    ignored = tuple(entry for entry in listing.ignored if entry not in images)
    return Listing(folder=folder, classes=(loose, *listing.classes), ignored=ignored)


def note_ignored(listing: Listing, progress: Progress) -> None:
    for note in listing.notes:
        progress.note(note)
    loose = [path for path in listing.ignored if _is_loose_image(path)]
    others = [path for path in listing.ignored if path not in loose]
    for why, ignored in (("beside the folders of classes", loose), ("not images", others)):
        if ignored:
            named = ", ".join(shown_in(path, listing.folder) for path in ignored[:5])
            more = and_more(ignored, named=5)
            progress.note(f"ignored in {shown(listing.folder)}, {why}: {named}{more}")


def _is_loose_image(path: Place) -> bool:
    """Return whether a file may be an image beside class folders. macOS writes `._name.png` beside
    each image of an archive."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def read_images(
    listing: Listing, *, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
) -> LabelledImages:
    """Read all images of `listing`. Refuse files that are not images, or leave them out."""
    files = [path for class_folder in listing.classes for path in class_folder.files]
    said = [
        group
        for class_folder in listing.classes
        for group in class_folder.groups or ("",) * len(class_folder.files)
    ]
    labels = np.repeat(
        np.arange(len(listing.classes)),
        [len(class_folder.files) for class_folder in listing.classes],
    )
    size = preprocessing.image_size
    pixels = np.zeros((len(files), size, size, 3), dtype=np.uint8)
    good = np.ones(len(files), dtype=bool)
    bad: list[str] = []

    def place(row: int) -> str | None:
        try:
            pixels[row] = read_pixels(read_file(files[row]), preprocessing)
        except ImageRejected as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        return None

    with progress.phase("reading images", total=len(files)) as phase:
        for row, reason in enumerate(in_threads(place, len(files))):
            if reason is not None:
                good[row] = False
                bad.append(f"{shown_in(files[row], listing.folder)} ({reason})")
            phase.advance(1)
    if bad:
        _refuse_or_note(bad, skip_bad=skip_bad, progress=progress)
    return LabelledImages(
        classes=listing.names,
        pixels_NHWC=pixels[good],
        labels_N=labels[good].astype(np.int64),
        names=[shown_in(files[row], listing.folder) for row in np.flatnonzero(good)],
        groups=[said[row] for row in np.flatnonzero(good)],
    )


def _refuse_or_note(bad: list[str], *, skip_bad: bool, progress: Progress) -> None:
    named = "; ".join(bad[:MAX_NAMED]) + and_more(bad)
    if not skip_bad:
        raise DataRejected(
            f"{counted(len(bad), 'image')} cannot be read: {named}; `skip_bad` goes on without them"
        )
    progress.note(f"going on without {counted(len(bad), 'image')} that cannot be read: {named}")


def and_more(items: Collection[object], *, named: int = MAX_NAMED) -> str:
    return f" and {len(items) - named} more" if len(items) > named else ""
