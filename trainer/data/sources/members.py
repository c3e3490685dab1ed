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
from trainer.data import limits
from trainer.data.limits import Unpacking
from trainer.data.sources.place import inner_parts, shown

MAX_TOLD = 20
MAX_NAME = 1000
"""Characters of a name that are told."""


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
        if self.stat().st_size > limits.MAX_FILE_BYTES:
            raise ImageRejected(
                f"{size(self.stat().st_size)}; at most {size(limits.MAX_FILE_BYTES)} are read"
            )
        return b"".join(self.chunks())


@dataclass(slots=True)
class Tree:
    """Collect members. A name that is hostile is a problem of the whole archive."""

    archive: Path
    unpacking: Unpacking
    problems: int = 0
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Member(self.archive.name, self.archive, inside={})

    root: Member = field(init=False)

    def refuse(self, name: str, reason: str) -> None:
        """Count a hostile member, and keep the reason of the first ones."""
        self.unpacking.count_member()
        self.problems += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"{shown(name[:MAX_NAME])} {reason}")

    def add(self, name: str, content: Content | None) -> None:
        """Add a file, or a folder where there is no content."""
        try:
            parts = inner_parts(name)
        except ValueError as error:
            if content is not None or name.strip("./"):
                self.refuse(name, str(error))
            else:
                self.unpacking.count_member()
            return
        self._place(parts, name, content)

    def _place(self, parts: tuple[str, ...], name: str, content: Content | None) -> None:
        folder = self.root
        for part in parts if content is None else parts[:-1]:
            assert folder.inside is not None
            if part not in folder.inside:
                self._keep(Member(part, self.archive, above=folder, inside={}))
            folder = folder.inside[part]
            if folder.inside is None:
                return self.refuse(name, "is in a file of the same name")
        if content is None:
            return self.unpacking.count_member()
        assert folder.inside is not None
        if parts[-1] in folder.inside:
            return self.refuse(name, "comes twice")
        return self._keep(Member(parts[-1], self.archive, above=folder, content=content))

    def _keep(self, new: Member) -> None:
        self.unpacking.count_member()
        assert new.above is not None
        assert new.above.inside is not None
        new.above.inside[new.name] = new

    def checked(self) -> Member:
        """Return the root. Raise DataRejected where any member is hostile."""
        if self.problems:
            named = "; ".join(self.told)
            more = self.problems - len(self.told)
            raise DataRejected(
                f"{shown(self.archive)} is refused, and nothing of it is read, for "
                f"{counted(self.problems, 'member')}: {named}"
                + (f" and {more} more" if more > 0 else "")
            )
        return self.root
