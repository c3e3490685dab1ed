"""Hold the members of an archive as a tree of places, and refuse hostile ones.

Names are looked up in the tree only; no file of a disk is opened by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from model_store.errors import DataRejected, ImageRejected
from model_store.tables import counted, size
from trainer.data.sources.place import inner_parts, shown

MAX_MEMBERS = 1_000_000
MAX_UNPACKED_BYTES = 1 << 38
MAX_FILE_BYTES = 1 << 27
"""Bytes of one image or table. An image of the most pixels that are read has fewer."""
MAX_RATIO = 200
"""Unpacked bytes for each packed one, counted from FREE_BYTES on."""
FREE_BYTES = 1 << 28
MAX_TOLD = 20


class Content(Protocol):
    """The bytes of a member, unpacked while they are read."""

    @property
    def size(self) -> int: ...
    def chunks(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class MemberSize:
    st_size: int


@dataclass(slots=True, eq=False)
class Member:
    """A file or folder in an archive, or a name that is in none."""

    name: str
    archive: Path
    above: Member | None = None
    content: Content | None = None
    inside: dict[str, Member] | None = None

    def __str__(self) -> str:
        if self.above is None:
            return str(self.archive)
        return f"{self.archive.name}: {'/'.join(self._names())}"

    def _names(self) -> list[str]:
        names, one = [], self
        while one.above is not None:
            names.append(one.name)
            one = one.above
        return names[::-1]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Member:
        return self.above or self

    def exists(self) -> bool:
        return self.content is not None or self.inside is not None

    def is_dir(self) -> bool:
        return self.inside is not None

    def is_file(self) -> bool:
        return self.content is not None

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[Member]:
        return iter((self.inside or {}).values())

    def joinpath(self, *parts: str) -> Member:
        found = self
        for part in parts:
            found = (found.inside or {}).get(part) or Member(part, self.archive, above=found)
        return found

    def stat(self) -> MemberSize:
        return MemberSize(self.content.size if self.content else 0)

    def chunks(self) -> Iterator[bytes]:
        if self.content is None:
            raise ImageRejected("not in the archive")
        return self.content.chunks()

    def read_bytes(self) -> bytes:
        if self.stat().st_size > MAX_FILE_BYTES:
            raise ImageRejected(
                f"{size(self.stat().st_size)}; at most {size(MAX_FILE_BYTES)} are read"
            )
        return b"".join(self.chunks())


@dataclass(slots=True)
class Unpacking:
    """Count unpacked bytes, and stop before an archive fills a disk."""

    archive: Path
    packed_bytes: int
    unpacked_bytes: int = 0

    def count(self, more_bytes: int) -> None:
        self.unpacked_bytes += more_bytes
        if self.unpacked_bytes > MAX_UNPACKED_BYTES:
            raise DataRejected(
                f"{shown(self.archive)} unpacks to more than {size(MAX_UNPACKED_BYTES)}: "
                "unpack it, and give the folder"
            )
        if self.unpacked_bytes > max(FREE_BYTES, MAX_RATIO * self.packed_bytes):
            raise DataRejected(
                f"{shown(self.archive)} unpacks to more than {MAX_RATIO} times its size, as a "
                "decompression bomb does; if you trust it, unpack it and give the folder"
            )


@dataclass(slots=True)
class Tree:
    """Collect members. A name that is hostile is a problem of the whole archive."""

    archive: Path
    unpacking: Unpacking
    problems: list[str] = field(default_factory=list)
    members: int = 0

    def __post_init__(self) -> None:
        self.root = Member(self.archive.name, self.archive, inside={})

    root: Member = field(init=False)

    def refuse(self, name: str, reason: str) -> None:
        self.problems.append(f"{shown(name)} {reason}")

    def add(self, name: str, content: Content | None) -> None:
        """Add a file, or a folder where there is no content."""
        self.members += 1
        if self.members > MAX_MEMBERS:
            raise DataRejected(f"{shown(self.archive)} has more than {MAX_MEMBERS:,} files")
        try:
            parts = inner_parts(name)
        except ValueError as error:
            if content is not None or name.strip("./"):
                self.refuse(name, str(error))
            return
        if content is not None:
            self.unpacking.count(content.size)
        self._place(parts, name, content)

    def _place(self, parts: tuple[str, ...], name: str, content: Content | None) -> None:
        folder = self.root
        for part in parts if content is None else parts[:-1]:
            assert folder.inside is not None
            below = folder.inside.setdefault(
                part, Member(part, self.archive, above=folder, inside={})
            )
            if below.inside is None:
                return self.refuse(name, "is in a file of the same name")
            folder = below
        if content is not None:
            assert folder.inside is not None
            if parts[-1] in folder.inside:
                return self.refuse(name, "comes twice")
            file = Member(parts[-1], self.archive, above=folder, content=content)
            folder.inside[parts[-1]] = file
        return None

    def checked(self) -> Member:
        """Return the root. Raise DataRejected where any member is hostile."""
        if self.problems:
            named = "; ".join(self.problems[:MAX_TOLD])
            more = len(self.problems) - MAX_TOLD
            raise DataRejected(
                f"{shown(self.archive)} is refused, and nothing of it is read, for "
                f"{counted(len(self.problems), 'member')}: {named}"
                + (f" and {more} more" if more > 0 else "")
            )
        return self.root
