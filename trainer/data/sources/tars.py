"""Read the members of a tar by their offsets; a packed tar is unpacked to a nameless file first."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import zlib
from pathlib import Path

from model_store.errors import DataRejected
from trainer.data import limits
from trainer.data.limits import Unpacking
from trainer.data.sources.members import Member, Tree
from trainer.data.sources.place import shown
from trainer.data.sources.stored_bytes import CHUNK_BYTES, BoundedReader, Part, StoredBytes

GZIP, BZIP2 = b"\x1f\x8b", b"BZh"
OTHERS = {b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Packers that take as much memory as the archive asks for, or that are not in the library."""
DAMAGES = (
    tarfile.TarError,
    zlib.error,
    ValueError,
    OverflowError,
    EOFError,
    OSError,
)
MAX_GLOBAL_HEADERS = 100
"""The library copies these for every member."""


class HeaderReader(BoundedReader):
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
        tree = Tree(path, unpacking)
        with (
            stored.reader(HeaderReader) as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            _add_all(tree, archive, stored, file)
    except DAMAGES as error:
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
        if name := next((OTHERS[one] for one in OTHERS if magic.startswith(one)), None):
            raise DataRejected(
                f"{shown(path)} is packed with {name}: unpack it, or pack it with gzip"
            )
        if magic.startswith(GZIP):
            with gzip.GzipFile(fileobj=file) as packed:
                return _copied(packed, unpacking)
        if magic.startswith(BZIP2):
            with bz2.BZ2File(file) as other:
                return _copied(other, unpacking)
    return StoredBytes.of(path)


def _copied(packed: io.BufferedIOBase, unpacking: Unpacking) -> StoredBytes:
    stored = StoredBytes.temporary()
    while data := packed.read(CHUNK_BYTES):
        unpacking.count(len(data))
        stored.append(data)
    return stored


def _add_all(tree: Tree, archive: tarfile.TarFile, stored: StoredBytes, file: HeaderReader) -> None:
    at = -1
    while (member := archive.next()) is not None:
        if member.offset <= at or member.size < 0:
            raise ValueError("a header leads backwards")
        if len(archive.pax_headers) > MAX_GLOBAL_HEADERS:
            raise ValueError(f"it has more than {MAX_GLOBAL_HEADERS} global headers")
        at, file.header_bytes = member.offset, 0
        # The library would keep a kilobyte a member.
        archive.members = []  # type: ignore[attr-defined]
        _add(tree, member, stored)


def _add(tree: Tree, member: tarfile.TarInfo, stored: StoredBytes) -> None:
    if member.isdir():
        return tree.add(member.name, None)
    if not member.isreg() or member.issparse():
        return tree.refuse(member.name, "is a link or a device; pack the files themselves")
    if member.offset_data + member.size > stored.size:
        raise ValueError(f"it ends inside {shown(member.name)}")
    return tree.add(member.name, Part(stored, member.offset_data, member.size))
