"""Keep bytes in one file without a name, and read parts of it from any thread.

Nothing is written under a name that an archive or a table chose.
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
from typing import BinaryIO, TypeVar

from model_store.errors import DataRejected, ImageRejected
from trainer.data import limits

CHUNK_BYTES = 1 << 20
Reader = TypeVar("Reader", bound="BoundedReader")


class BoundedReader(io.BufferedReader):
    """A file that refuses to read a length that only a forged header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > limits.MAX_ONE_READ:
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

    def append(self, data: bytes) -> Part:
        """Write at the end."""
        part = Part(self, self.size, len(data))
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
class Part:
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
