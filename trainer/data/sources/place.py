"""Name files and folders alike, whether they are on a disk or inside an archive, and tell those
that are meant as images from stray ones.

`pathlib.Path` is a place as it is; `trainer.data.sources.archives.Member` is one in an archive.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

from model_store.errors import DataRejected, WrongUsage
from model_store.names import is_shown

MAX_DEPTH = 32
"""Folders in folders that a name from outside may have."""
_DRIVE = re.compile(r"[A-Za-z]:/")
ZIPS = (".zip",)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
ARCHIVES = (*ZIPS, *TARS)
CSV, JSONL, JSON, PARQUET = (".csv", ".tsv"), (".jsonl", ".ndjson"), (".json",), (".parquet",)
FILES = (*ARCHIVES, *CSV, *JSONL, *JSON, *PARQUET)
"""Endings of files that can hold data."""
# The content decides whether a file is an image; the name only tells what was meant as one.
IMAGE_SUFFIXES = frozenset(
    [
        ".apng",
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".heic",
        ".heif",
        ".hif",
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
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


class Sized(Protocol):
    @property
    def st_size(self) -> int: ...


class ImageSource(Protocol):
    """Bytes that should be an image. `str` of it tells a user where it is."""

    def read_bytes(self) -> bytes: ...


class Place(ImageSource, Protocol):
    """The part of `pathlib.Path` that reading data needs."""

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Place: ...
    def exists(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_file(self) -> bool: ...
    def is_symlink(self) -> bool: ...
    def iterdir(self) -> Iterator[Place]: ...
    def joinpath(self, *parts: str) -> Place: ...
    def stat(self) -> Sized: ...


def shown(place: object) -> str:
    """Show a path to a user, with control characters and broken encodings escaped."""
    text = str(place)
    return text if is_shown(text) else repr(text)


def refuse_missing(path: Path, *, setting: str) -> None:
    if not path.exists():
        raise WrongUsage(f"`{setting}={shown(path)}` does not exist")


def shown_in(place: object, folder: object) -> str:
    """Show a path as it stands in `folder`, or beside a table; members name their archive."""
    if isinstance(place, Path) and isinstance(folder, Path):
        for above in (folder, folder.parent):
            if place.is_relative_to(above):
                return shown(place.relative_to(above))
    return shown(place)


def inner_parts(name: str) -> tuple[str, ...]:
    """Split a name from outside into parts that stay inside. Raise ValueError with the reason."""
    text = name.replace("\\", "/")
    if "://" in text:
        raise ValueError("is an address; images are read from files only")
    if text.startswith("/") or _DRIVE.match(text):
        raise ValueError("is an absolute path; give paths relative to the file")
    parts = tuple(part for part in text.split("/") if part not in ("", "."))
    if ".." in parts:
        raise ValueError("leads out of the data with `..`")
    if not parts or "\0" in text:
        raise ValueError("is not the name of a file")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"is more than {MAX_DEPTH} folders deep")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("is not UTF-8; pack it again with names in UTF-8")
    return parts


def name_of(path: Path) -> str:
    """Name data by its folder, or by its file without the ending."""
    name = path.resolve().name
    ending = max((one for one in FILES if name.lower().endswith(one)), key=len, default="")
    return name[: -len(ending)] if ending and not path.is_dir() else name


def entries(folder: Place) -> list[Place]:
    """List a folder by name."""
    try:
        return sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataRejected(f"{shown(folder)} cannot be read: {error.strerror}") from error


def is_stray(entry: Place) -> bool:
    return entry.name.startswith(".") or entry.name.lower() in _SYSTEM_FILES


def folders_in(folder: Place) -> list[Place]:
    """List the folders in `folder` that are not hidden."""
    return [entry for entry in entries(folder) if entry.is_dir() and not is_stray(entry)]


def images_in(folder: Place) -> tuple[tuple[Place, ...], list[Place]]:
    """List the files in `folder` that are meant as images, and all other entries."""
    files: list[Place] = []
    ignored: list[Place] = []
    for entry in entries(folder):
        meant_as_image = entry.suffix.lower() in IMAGE_SUFFIXES or not entry.suffix
        # A link that leads nowhere was meant as an image: reading the link names the fault.
        readable = entry.is_file() or (entry.is_symlink() and not entry.exists())
        (files if meant_as_image and readable and not is_stray(entry) else ignored).append(entry)
    return tuple(files), ignored


def folders_of_images(places: Collection[Place]) -> list[Place]:
    """Keep the entries that are folders with images in them."""
    return [
        place for place in places if place.is_dir() and not is_stray(place) and images_in(place)[0]
    ]
