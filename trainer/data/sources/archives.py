"""Hold the members of zips and tars as a tree of places, and refuse hostile ones.

Names are looked up in the tree only; no file of a disk is opened by them. A packed tar is unpacked
to a nameless file first."""

from __future__ import annotations

import bz2
import gzip
import io
import stat
import struct
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from model_store.errors import DataRejected, ImageRejected
from model_store.tables import counted, size
from trainer.data.sources import limits
from trainer.data.sources.limits import (
    CHUNK_BYTES,
    BoundedReader,
    FileSlice,
    StoredBytes,
    Unpacking,
)
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
class _MemberSize:
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

    def stat(self) -> _MemberSize:
        return _MemberSize(self.content.size if self.content else 0)

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
class _Tree:
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


_ENCRYPTED, _UTF_8 = 0x1, 0x800
_ENTRY = b"PK\x01\x02"
"""The first bytes of each entry of a zip's directory."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Others ask for memory as the archive likes (LZMA), or are rare."""
_DAMAGES = (
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    zlib.error,
    ValueError,
    OverflowError,
    NotImplementedError,
    EOFError,
    OSError,
)


class _ZipReader(BoundedReader):
    """A zip that refuses a directory of too many entries before the library keeps them all."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if data.count(_ENTRY) > limits.MAX_MEMBERS:
            raise ValueError(f"it lists more than {limits.MAX_MEMBERS:,} files")
        return data


@dataclass(frozen=True, slots=True)
class _ZipContent:
    archive: zipfile.ZipFile
    entry: zipfile.ZipInfo

    @property
    def size(self) -> int:
        return self.entry.file_size

    def chunks(self) -> Iterator[bytes]:
        try:
            with self.archive.open(self.entry) as file:
                while data := file.read(CHUNK_BYTES):
                    yield data
        except _DAMAGES as error:
            raise ImageRejected(f"damaged in the archive: {error}") from error


def open_zip(path: Path) -> Member:
    """List a zip as a tree of places. Raise DataRejected where it is damaged or hostile."""
    file = _ZipReader(io.FileIO(path))
    try:
        archive = zipfile.ZipFile(file)
    except _DAMAGES as error:
        file.close()
        raise DataRejected(f"{shown(path)} is not a zip that can be read: {error}") from error
    weakref.finalize(archive, file.close)
    tree = _Tree(path, Unpacking(path, path.stat().st_size))
    for entry in archive.infolist():
        _add_entry(tree, archive, entry)
    return tree.checked()


def _add_entry(tree: _Tree, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    if not entry.flag_bits & _UTF_8:
        try:
            name = name.encode("cp437").decode()
        except UnicodeError:
            return tree.refuse(name, "is not UTF-8; pack it again with names in UTF-8")
    if kind and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return tree.refuse(name, "is a link or a device; pack the files themselves")
    if entry.flag_bits & _ENCRYPTED:
        return tree.refuse(name, "is encrypted; unpack it with its password, and give the folder")
    if name.endswith(("/", "\\")):
        return tree.add(name, None)
    if entry.compress_type not in METHODS:
        return tree.refuse(
            name, f"is packed by method {entry.compress_type}; pack it again with deflate"
        )
    tree.unpacking.count(entry.file_size)
    return tree.add(name, _ZipContent(archive, entry))


_GZIP, _BZIP2 = b"\x1f\x8b", b"BZh"
OTHERS = {b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Packers that take as much memory as the archive asks for, or that are not in the library."""
_MAX_GLOBAL_HEADERS = 100
"""The library copies these for every member."""


class _HeaderReader(BoundedReader):
    """A tar of which the library reads the headers alone, within a limit for each member.

    Long names, pax headers, maps of sparse files and chains of headers all count.
    """

    header_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.header_bytes += size or 0
        if size is None or size < 0 or self.header_bytes > limits.MAX_HEADER_BYTES:
            raise ValueError(
                f"a member has headers of more than {limits.MAX_HEADER_BYTES >> 10} KiB"
            )
        return super().read(size)


def open_tar(path: Path) -> Member:
    """List a tar as a tree of places. Raise DataRejected where it is damaged or hostile."""
    unpacking = Unpacking(path, path.stat().st_size)
    try:
        stored = _unpacked(path, unpacking)
        tree = _Tree(path, unpacking)
        with (
            stored.reader(_HeaderReader) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            _add_all(tree, archive, stored, file)
    except _DAMAGES as error:
        raise DataRejected(f"{shown(path)} is not a tar that can be read: {error}") from error
    except RecursionError as error:  # the library calls itself for each header before a member
        raise DataRejected(
            f"{shown(path)} is not a tar that can be read: it has a chain of headers"
        ) from error
    return tree.checked()


def _unpacked(path: Path, unpacking: Unpacking) -> StoredBytes:
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if name := next((OTHERS[packer] for packer in OTHERS if magic.startswith(packer)), None):
            raise DataRejected(
                f"{shown(path)} is packed with {name}: unpack it, or pack it with gzip"
            )
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as packed:
                return _copied(packed, unpacking)
        if magic.startswith(_BZIP2):
            with bz2.BZ2File(file) as other:
                return _copied(other, unpacking)
    return StoredBytes.of(path)


def _copied(packed: io.BufferedIOBase, unpacking: Unpacking) -> StoredBytes:
    stored = StoredBytes.temporary()
    while data := packed.read(CHUNK_BYTES):
        unpacking.count(len(data))
        stored.append(data)
    return stored


def _add_all(
    tree: _Tree, archive: tarfile.TarFile, stored: StoredBytes, file: _HeaderReader
) -> None:
    at = -1
    while (member := archive.next()) is not None:
        if member.offset <= at or member.size < 0:
            raise ValueError("a header leads backwards")
        if len(archive.pax_headers) > _MAX_GLOBAL_HEADERS:
            raise ValueError(f"it has more than {_MAX_GLOBAL_HEADERS} global headers")
        at, file.header_bytes = member.offset, 0
        # The library would keep a kilobyte a member.
        archive.members = []  # type: ignore[attr-defined]
        _add_member(tree, member, stored)


def _add_member(tree: _Tree, member: tarfile.TarInfo, stored: StoredBytes) -> None:
    if member.isdir():
        return tree.add(member.name, None)
    if not member.isreg() or member.issparse():
        return tree.refuse(member.name, "is a link or a device; pack the files themselves")
    if member.offset_data + member.size > stored.size:
        raise ValueError(f"it ends inside {shown(member.name)}")
    return tree.add(member.name, FileSlice(stored, member.offset_data, member.size))
