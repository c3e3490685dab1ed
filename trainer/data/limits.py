"""Hold the limits of all forms of data in one place, and count what a source takes.

Data comes from strangers. A kilobyte can be packed so that it unpacks to gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_store.errors import DataRejected, ImageRejected
from model_store.received import parse_json
from model_store.tables import size
from trainer.data.sources.place import Picture, Place, shown

MAX_MEMBERS = 1_000_000
"""Files and folders of an archive, or rows of a table."""
MAX_UNPACKED_BYTES = 1 << 38
MAX_FILE_BYTES = 1 << 27
"""Bytes of one image or table. An image of the most pixels that are read has fewer."""
MAX_ONE_READ = 1 << 27
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


def read_file(file: Picture) -> bytes:
    """Read an image, on a disk or in an archive. Raise ImageRejected if it has too many bytes."""
    if isinstance(file, Path) and (found := file.stat().st_size) > MAX_FILE_BYTES:
        raise ImageRejected(f"{size(found)}; at most {size(MAX_FILE_BYTES)} are read")
    return file.read_bytes()


def parse_table(data: bytes) -> Any:
    """Parse the JSON of a table. Raise ValueError with the reason."""
    return parse_json(data, most_memory=MAX_MEMORY)
