"""Tell files that are meant as images from stray ones, by their names."""

from __future__ import annotations

from collections.abc import Collection

from model_store.errors import DataRejected
from trainer.data.sources.place import Place, shown

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
SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


def entries(folder: Place) -> list[Place]:
    """List a folder by name."""
    try:
        return sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataRejected(f"{shown(folder)} cannot be read: {error.strerror}") from error


def is_stray(entry: Place) -> bool:
    return entry.name.startswith(".") or entry.name.lower() in SYSTEM_FILES


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
    return [one for one in places if one.is_dir() and not is_stray(one) and images_in(one)[0]]
