"""Read the members of a zip in place."""

from __future__ import annotations

import io
import stat
import struct
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import DataRejected, ImageRejected
from trainer.data import limits
from trainer.data.limits import Unpacking
from trainer.data.sources.members import Member, Tree
from trainer.data.sources.place import shown
from trainer.data.sources.stored_bytes import CHUNK_BYTES, BoundedReader

ENCRYPTED, UTF_8 = 0x1, 0x800
ENTRY = b"PK\x01\x02"
"""The first bytes of each entry of a zip's directory."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Others ask for memory as the archive likes (LZMA), or are rare."""
DAMAGES = (
    zipfile.BadZipFile,
    struct.error,
    zlib.error,
    ValueError,
    OverflowError,
    NotImplementedError,
    EOFError,
    OSError,
)


class ZipReader(BoundedReader):
    """A zip that refuses a directory of too many entries before the library keeps them all."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if data.count(ENTRY) > limits.MAX_MEMBERS:
            raise ValueError(f"it lists more than {limits.MAX_MEMBERS:,} files")
        return data


@dataclass(frozen=True, slots=True)
class ZipContent:
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
        except DAMAGES as error:
            raise ImageRejected(f"damaged in the archive: {error}") from error


def open_zip(path: Path) -> Member:
    """List a zip as a tree of places. Raise DataRejected where it is damaged or hostile."""
    file = ZipReader(io.FileIO(path))
    try:
        archive = zipfile.ZipFile(file)
    except DAMAGES as error:
        file.close()
        raise DataRejected(f"{shown(path)} is not a zip that can be read: {error}") from error
    weakref.finalize(archive, file.close)
    tree = Tree(path, Unpacking(path, path.stat().st_size))
    for entry in archive.infolist():
        _add(tree, archive, entry)
    return tree.checked()


def _add(tree: Tree, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    if not entry.flag_bits & UTF_8:
        try:
            name = name.encode("cp437").decode()
        except UnicodeError:
            return tree.refuse(name, "is not UTF-8; pack it again with names in UTF-8")
    if kind and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return tree.refuse(name, "is a link or a device; pack the files themselves")
    if entry.flag_bits & ENCRYPTED:
        return tree.refuse(name, "is encrypted; unpack it with its password, and give the folder")
    if name.endswith(("/", "\\")):
        return tree.add(name, None)
    if entry.compress_type not in METHODS:
        return tree.refuse(
            name, f"is packed by method {entry.compress_type}; pack it again with deflate"
        )
    tree.unpacking.count(entry.file_size)
    return tree.add(name, ZipContent(archive, entry))
