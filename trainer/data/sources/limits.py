"""Hold the limits of all forms of data in one place, and count what a source takes.

Data comes from strangers. A kilobyte can be packed so that it unpacks to gigabytes.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from model_store.errors import DataRejected, ImageRejected
from model_store.received import parse_json
from model_store.tables import size
from trainer.data.sources.place import ImageSource, Place, shown

MAX_MEMBERS = 1_000_000
"""Files and folders of an archive, or rows of a table."""
MAX_UNPACKED_BYTES = 1 << 38
MAX_FILE_BYTES = 1 << 27
"""Bytes of one image or table. An image of the most pixels that are read has fewer."""
_MAX_ONE_READ = 1 << 27
"""Bytes that a reader of archives may ask for at once: more is a forged length."""
MAX_ROW_BYTES = 1 << 20
"""Characters of one row of CSV."""
MAX_HEADER_BYTES = 1 << 20
"""Bytes of the headers before one member of a tar."""
MAX_PAGE_BYTES = 1 << 27
"""Bytes of one page of parquet. Images are hardly packed, and a page is read at once."""
MAX_GROUPS_BYTES = 1 << 22
"""Bytes of a file of groups."""
MAX_MEMORY = 1 << 30
"""Bytes of memory for a table that is read as a whole."""
MAX_RATIO = 200
"""Unpacked bytes for each packed one, counted from FREE_BYTES on."""
FREE_BYTES = 1 << 28
NODE_BYTES = 1 << 10
"""Bytes of memory that a file or folder takes while its archive is open, at most."""


@dataclass(slots=True)
class Unpacking:
    """Count the bytes that a source unpacks to, and stop before it fills a disk or the memory."""

    source: Place
    packed_bytes: int
    unpacked_bytes: int = 0
    members: int = 0

    def count(self, more_bytes: int) -> None:
        """Count bytes before they are written or kept."""
        self.unpacked_bytes += more_bytes
        if self.unpacked_bytes > MAX_UNPACKED_BYTES:
            raise DataRejected(
                f"{shown(self.source)} unpacks to more than {size(MAX_UNPACKED_BYTES)}: "
                "unpack it, and give the folder"
            )
        if self.unpacked_bytes > max(FREE_BYTES, MAX_RATIO * self.packed_bytes):
            raise DataRejected(
                f"{shown(self.source)} unpacks to more than {MAX_RATIO} times its size, as a "
                "decompression bomb does; if you trust it, unpack it and give the folder"
            )

    def count_member(self) -> None:
        """Count a file, a folder, a row or anything else that an archive or a table lists."""
        self.members += 1
        if self.members > MAX_MEMBERS:
            raise DataRejected(
                f"{shown(self.source)} has more than {MAX_MEMBERS:,} files, folders or rows: give "
                "them in parts"
            )
        if self.members * NODE_BYTES > max(FREE_BYTES, MAX_RATIO * self.packed_bytes):
            raise DataRejected(
                f"{shown(self.source)} lists {self.members:,} files and folders in "
                f"{size(self.packed_bytes)}, as a decompression bomb does; if you trust it, "
                "unpack it and give the folder"
            )


def read_file(file: ImageSource) -> bytes:
    """Read an image, on a disk or in an archive. Raise ImageRejected if it has too many bytes."""
    if isinstance(file, Path) and (found := file.stat().st_size) > MAX_FILE_BYTES:
        raise ImageRejected(f"{size(found)}; at most {size(MAX_FILE_BYTES)} are read")
    return file.read_bytes()


def parse_table(data: bytes) -> Any:
    """Parse the JSON of a table. Raise ValueError with the reason."""
    return parse_json(data, most_memory=MAX_MEMORY)


CHUNK_BYTES = 1 << 20
Reader = TypeVar("Reader", bound="BoundedReader")


class BoundedReader(io.BufferedReader):
    """A file that refuses to read a length that only a forged header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_ONE_READ:
            raise ValueError(f"a header asks for {size} bytes at once")
        return super().read(size)


class StoredBytes:
    """A file that is only read, by offsets, or a temporary one that is written once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        weakref.finalize(self, file.close)

    @classmethod
    def of(cls, path: Path) -> StoredBytes:
        return cls(path.open("rb", buffering=0))

    @classmethod
    def temporary(cls) -> StoredBytes:
        """Make an empty file in $TMPDIR that has no name, and is gone with the process."""
        return cls(tempfile.TemporaryFile(buffering=0))

    def append(self, data: bytes) -> FileSlice:
        """Write at the end."""
        part = FileSlice(self, self.size, len(data))
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise DataRejected(_no_room(error)) from error
        self.size += len(data)
        return part

    def reader(self, kind: type[Reader]) -> Reader:
        """Open the file again from its beginning, for libraries that want a file."""
        copy = os.dup(self._file.fileno())
        os.lseek(copy, 0, os.SEEK_SET)
        return kind(io.FileIO(copy, "rb"))

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Some bytes of a file."""

    stored: StoredBytes
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        done = 0
        while done < self.size:
            data = self.stored.read(self.offset + done, min(CHUNK_BYTES, self.size - done))
            if not data:
                raise ImageRejected("the archive ends before this file does")
            done += len(data)
            yield data


def _no_room(error: OSError) -> str:
    folder = tempfile.gettempdir()
    if error.errno == errno.ENOSPC:
        return f"{folder} has no room to unpack the data: set TMPDIR to a folder with more room"
    return f"the data cannot be unpacked in {folder}: {error.strerror}"
