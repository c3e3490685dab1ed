"""Name files and folders alike, whether they are on a disk or inside an archive.

`pathlib.Path` is a place as it is; `trainer.data.sources.members.Member` is one in an archive.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from model_store.names import is_shown

MAX_DEPTH = 32
"""Folders in folders that a name from outside may have."""
DRIVE = re.compile(r"[A-Za-z]:/")


class Sized(Protocol):
    @property
    def st_size(self) -> int: ...


class Picture(Protocol):
    """Bytes that should be an image. `str` of it tells a user where it is."""

    def read_bytes(self) -> bytes: ...


class Place(Picture, Protocol):
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
    if text.startswith("/") or DRIVE.match(text):
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
