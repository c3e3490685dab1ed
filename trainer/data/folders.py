"""Folders of images, one folder a class, become one array of pixels.

Says clearly what it ignores, what it cannot read and what is too little. Knows nothing of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DataRejected, ImageRejected, WrongUsage
from model_store.names import is_shown, new_class_name, spelt_among
from model_store.preprocess import read_pixels
from model_store.records.manifest import Preprocessing
from model_store.tables import counted
from trainer.progress import Progress

MIN_IMAGES_PER_CLASS = 2
MAX_NAMED = 20
DECODING_THREADS = min(4, os.cpu_count() or 1)
# Whether a file really is an image, its content decides; the name only tells what was meant as one.
IMAGE_SUFFIXES = frozenset(
    [
        ".apng",
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".heic",
        ".heif",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pcx",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
JUDGE_NAMES = ("val", "valid", "validation", "test")
SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolder:
    name: str
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a data folder holds: classes by name, and the stray entries that are not images."""

    folder: Path
    classes: tuple[ClassFolder, ...]
    ignored: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.classes)

    @property
    def images(self) -> int:
        return sum(len(one.files) for one in self.classes)

    def spelt_as(self, known: Collection[str]) -> Listing:
        """Give every class the spelling that its name has among `known`, if it is there."""
        classes = (
            replace(one, name=spelt_among(one.name, known) or one.name) for one in self.classes
        )
        return replace(self, classes=tuple(classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """Pixels and the class of each image, as an index into `classes`."""

    classes: tuple[str, ...]
    pixels_NHWC: NDArray[np.uint8]
    labels_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, rows: NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(
            classes=self.classes,
            pixels_NHWC=self.pixels_NHWC[rows],
            labels_N=self.labels_N[rows],
        )

    def rows_of(self, class_name: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.labels_N == self.classes.index(class_name)).astype(np.int64)

    def among(self, classes: tuple[str, ...]) -> LabelledImages:
        """The same images, labelled as indices into a longer or reordered list of classes."""
        places = np.array([classes.index(name) for name in self.classes], dtype=np.int64)
        return LabelledImages(
            classes=classes, pixels_NHWC=self.pixels_NHWC, labels_N=places[self.labels_N]
        )


def join(first: LabelledImages, *others: LabelledImages) -> LabelledImages:
    """One set out of several that speak of the same classes."""
    sets = (first, *others)
    return LabelledImages(
        classes=first.classes,
        pixels_NHWC=np.concatenate([one.pixels_NHWC for one in sets]),
        labels_N=np.concatenate([one.labels_N for one in sets]),
    )


def list_classes(folder: Path, *, option: str = "--data") -> Listing:
    """The class folders in `folder`, by name. WrongUsage when there is nothing to learn from."""
    if not folder.exists():
        raise WrongUsage(f"{option} {shown(folder)} does not exist")
    if not folder.is_dir():
        raise WrongUsage(f"{option} {shown(folder)} is not a folder")
    entries = _entries(folder)
    if not entries:
        raise WrongUsage(
            f"{option} {shown(folder)} is empty; it needs one folder of images a class"
        )
    strays = [entry for entry in entries if _is_stray(entry) or not entry.is_dir()]
    folders = [entry for entry in entries if entry not in strays]
    if not folders:
        raise WrongUsage(
            f"{option} {shown(folder)} has no class folders; put the images of each class into "
            "a folder named after the class"
        )
    classes = []
    named: dict[str, Path] = {}
    for one in folders:
        files, ignored = _images_in(one)
        strays += ignored
        name = new_class_name(one.name)
        _refuse_twice(one, named.setdefault(name, one))
        classes.append(ClassFolder(name=name, files=files))
    return Listing(folder=folder, classes=tuple(classes), ignored=tuple(strays))


def refuse_nested(listing: Listing) -> None:
    """Refuse a data folder that has its classes one level deeper, as with train and val folders."""
    if listing.images:
        return
    split = {one.parent.name: one.parent for one in listing.ignored if _holds_images(one)}
    if not split:
        return
    names = {name.lower(): folder for name, folder in split.items()}
    first = names.get("train", next(iter(split.values())))
    use = f"--data {shown(first)}"
    judge = next((names[name] for name in JUDGE_NAMES if name in names), None)
    if judge is not None and judge != first:
        use += f" --val-data {shown(judge)}"
    raise WrongUsage(
        f"--data {shown(listing.folder)} has its class folders one level deeper: use {use}"
    )


def _holds_images(entry: Path) -> bool:
    return entry.is_dir() and not _is_stray(entry) and bool(_images_in(entry)[0])


def _refuse_twice(folder: Path, first: Path) -> None:
    """Escapes tell the two apart: on a screen their names are the same."""
    if folder != first:
        raise DataRejected(
            f"{shown(first)} ({first.name!a}) and {shown(folder)} ({folder.name!a}) "
            "are two spellings of one class name; put their images into one folder"
        )


def list_loose(folder: Path, *, option: str) -> Listing:
    """All images in `folder` and in the folders in it, whatever those are called."""
    if not folder.is_dir():
        return list_classes(folder, option=option)  # it says what is wrong
    here, others = _images_in(folder)
    loose = ClassFolder(name="", files=here)
    if not any(entry.is_dir() and not _is_stray(entry) for entry in others):
        return Listing(folder=folder, classes=(loose,), ignored=tuple(others))
    listing = list_classes(folder, option=option)
    ignored = tuple(entry for entry in listing.ignored if entry not in here)
    return Listing(folder=folder, classes=(loose, *listing.classes), ignored=ignored)


def refuse_familiar_classes(listing: Listing, known: Collection[str], *, option: str) -> None:
    familiar = [name for name in listing.names if name in known]
    if familiar:
        each = ", ".join(map(repr, familiar[:MAX_NAMED]))
        raise WrongUsage(
            f"{option} {shown(listing.folder)} holds {each}{_and_more(familiar)}, "
            "which the model knows"
        )


def refuse_small_classes(listing: Listing) -> None:
    small = [one for one in listing.classes if len(one.files) < MIN_IMAGES_PER_CLASS]
    if small:
        each = ", ".join(
            f"{one.name!r} has {counted(len(one.files), 'image')}" for one in small[:MAX_NAMED]
        )
        raise DataRejected(
            f"too few images: {each}{_and_more(small)}; a class needs at least "
            f"{MIN_IMAGES_PER_CLASS}"
        )


def refuse_known_classes(listing: Listing, known: Collection[str]) -> None:
    again = [name for name in listing.names if name in known]
    if again:
        each = ", ".join(map(repr, again[:MAX_NAMED]))
        raise DataRejected(
            f"the model knows {each}{_and_more(again)} already; a task brings new classes only, "
            "and --extend takes more images of classes that are known"
        )


def refuse_new_classes(listing: Listing, known: Collection[str]) -> None:
    new = [name for name in listing.names if name not in known]
    if new:
        each = ", ".join(map(repr, new[:MAX_NAMED]))
        raise DataRejected(
            f"the model does not know {each}{_and_more(new)}; --extend takes more images of known "
            "classes only, and without it new classes are learnt as a task"
        )


def refuse_retired_classes(listing: Listing, retired: Collection[str]) -> None:
    again = [name for name in listing.names if name in retired]
    if again:
        raise DataRejected(
            f"{again[0]!r} is the name of a class that was retired; "
            "`dne-store rename-class` gives that one another name, and sets this one free"
        )


def refuse_unknown_classes(listing: Listing, known: Collection[str], *, option: str) -> None:
    foreign = [name for name in listing.names if name not in known]
    if foreign:
        each = ", ".join(map(repr, foreign[:MAX_NAMED]))
        raise WrongUsage(
            f"{option} {shown(listing.folder)} holds {each}{_and_more(foreign)}, "
            "which the model does not know"
        )


def refuse_no_images(images: LabelledImages, listing: Listing, *, option: str) -> None:
    if not len(images):
        raise WrongUsage(f"{option} {shown(listing.folder)} holds no images to judge by")


def without_known(
    images: LabelledImages, known: LabelledImages, progress: Progress
) -> LabelledImages:
    """Only images that are not, pixel for pixel, among `known`: what is held out stays so."""
    seen = {pixels.tobytes() for pixels in known.pixels_NHWC}
    fresh = [row for row, pixels in enumerate(images.pixels_NHWC) if pixels.tobytes() not in seen]
    if not fresh:
        raise DataRejected("the model was given all of these images already")
    if len(fresh) < len(images):
        progress.note(
            f"{counted(len(images) - len(fresh), 'image')} left out, being in the store already"
        )
    return images.take(np.array(fresh, dtype=np.int64))


def note_ignored(listing: Listing, progress: Progress) -> None:
    if listing.ignored:
        named = ", ".join(shown(path.relative_to(listing.folder)) for path in listing.ignored[:5])
        more = _and_more(listing.ignored, named=5)
        progress.note(f"ignored in {shown(listing.folder)}, not images: {named}{more}")


def note_not_judged(listing: Listing, classes: Collection[str], progress: Progress) -> None:
    missing = [name for name in classes if name not in listing.names]
    if missing:
        each = ", ".join(map(repr, missing[:MAX_NAMED]))
        progress.note(
            f"{shown(listing.folder)} has no images of {each}{_and_more(missing)}: "
            "they will not be judged"
        )


def read_images(
    listing: Listing, *, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
) -> LabelledImages:
    """All images of `listing` as pixels. Files that are no images are named, or left out."""
    files = [path for one in listing.classes for path in one.files]
    labels = np.repeat(np.arange(len(listing.classes)), [len(one.files) for one in listing.classes])
    size = preprocessing.image_size
    pixels = np.zeros((len(files), size, size, 3), dtype=np.uint8)
    good = np.ones(len(files), dtype=bool)
    bad: list[str] = []

    def place(row: int) -> str | None:
        try:
            pixels[row] = read_pixels(files[row].read_bytes(), preprocessing)
        except ImageRejected as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        return None

    with progress.phase("reading images", total=len(files)) as phase:
        for row, reason in enumerate(_map_in_threads(place, len(files))):
            if reason is not None:
                good[row] = False
                bad.append(f"{shown(files[row].relative_to(listing.folder))} ({reason})")
            phase.advance(1)
    if bad:
        _refuse_or_note(bad, skip_bad=skip_bad, progress=progress)
    return LabelledImages(
        classes=listing.names, pixels_NHWC=pixels[good], labels_N=labels[good].astype(np.int64)
    )


def still_there(listing: Listing, images: LabelledImages) -> Listing:
    """`listing` without the files that were left out, for judging the class sizes again."""
    kept = np.bincount(images.labels_N, minlength=len(listing.classes))
    classes = tuple(
        ClassFolder(name=one.name, files=one.files[:count])
        for one, count in zip(listing.classes, kept.tolist(), strict=True)
    )
    return Listing(folder=listing.folder, classes=classes, ignored=listing.ignored)


def shown(path: Path) -> str:
    """A path as a user may see it: control characters and broken encodings are escaped."""
    text = str(path)
    return text if is_shown(text) else repr(text)


def _map_in_threads(place: Callable[[int], str | None], count: int) -> Iterator[str | None]:
    pool = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="decode")
    try:
        yield from pool.map(place, range(count))
    finally:
        # On Ctrl-C the images that nobody started to read are not read any more.
        pool.shutdown(cancel_futures=True)


def _refuse_or_note(bad: list[str], *, skip_bad: bool, progress: Progress) -> None:
    named = "; ".join(bad[:MAX_NAMED]) + _and_more(bad)
    if not skip_bad:
        raise DataRejected(
            f"{counted(len(bad), 'image')} cannot be read: {named}; --skip-bad goes on without them"
        )
    progress.note(f"going on without {counted(len(bad), 'image')} that cannot be read: {named}")


def _images_in(folder: Path) -> tuple[tuple[Path, ...], list[Path]]:
    files: list[Path] = []
    ignored: list[Path] = []
    for entry in _entries(folder):
        meant_as_image = entry.suffix.lower() in IMAGE_SUFFIXES or not entry.suffix
        # A link that leads nowhere was meant as an image: reading it says what is wrong.
        readable = entry.is_file() or (entry.is_symlink() and not entry.exists())
        (files if meant_as_image and readable and not _is_stray(entry) else ignored).append(entry)
    return tuple(files), ignored


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataRejected(f"{shown(folder)} cannot be read: {error.strerror}") from error


def _is_stray(entry: Path) -> bool:
    return entry.name.startswith(".") or entry.name.lower() in SYSTEM_FILES


def _and_more(items: Collection[object], *, named: int = MAX_NAMED) -> str:
    return f" and {len(items) - named} more" if len(items) > named else ""
