"""Keep the rows of `dne-store list` between two runs, in one file a store in the cache folder.

The file only saves time. It is passed over unless it is ours alone, whole, and made by this very
software. Only the list is shown from it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.store.cache import READ_FLAGS, cache_folder, replace_file
from model_store.store.keep import MAX_KEPT_BYTES, Keep, Key
from model_store.store.store import Store

FOLDER = "summaries"
MAX_FILES = 16
MAX_FILE_BYTES = 3 * MAX_KEPT_BYTES  # names and numbers stand beside the rows

log = logging.getLogger("model_store.kept_rows")

_OWN_NAME = re.compile(r"[0-9a-f]{32}\.rows|tmp-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The rows of one store on disk. `stamp` changes with the code that makes rows: rows of other
    code are not taken."""

    path: Path
    store: str
    stamp: str

    def load(self, keep: Keep) -> None:
        """Take over the rows that an earlier run has kept, if their seal fits."""
        try:
            seal, _, content = _read_own(self.path).partition(b"\n")
        except OSError:
            return
        if seal.decode(errors="replace") != self._seal(content):
            return
        for line in content.splitlines():
            name, size, modified_s, value = line.split(b"\t", 3)
            key = Key(self.store, name.decode(), int(size), float(modified_s))
            keep.put(key, value)

    def save(self, keep: Keep) -> None:
        """Keep the rows for the next run. A cache that cannot be written costs time alone."""
        content = b"\n".join(
            b"%s\t%d\t%s\t%s" % (key.name.encode(), key.bytes, repr(key.modified_s).encode(), value)
            for key, value in keep.items()
        )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_room(self.path.parent, besides=self.path.name)
            replace_file(self.path, self._seal(content).encode() + b"\n" + content)
        except OSError as error:
            log.debug("the rows of the list are not kept in %s: %s", self.path, error.strerror)

    def _seal(self, content: bytes) -> str:
        """Hash the rows and the stamp of the code that made them."""
        return hashlib.sha256(self.stamp.encode() + b"\n" + content).hexdigest()


def row_file(store: Store, *, stamp: str) -> RowFile:
    """Return the file for the rows of a store."""
    place = store.location if "://" in store.location else os.path.abspath(store.location)
    which = hashlib.sha256(f"{store.id} {place}".encode()).hexdigest()[:32]
    return RowFile(path=cache_folder() / FOLDER / f"{which}.rows", store=store.id, stamp=stamp)


def _read_own(path: Path) -> bytes:
    """Read a regular file that nobody else can have written; no bytes of any other file."""
    with open(os.open(path, READ_FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not own or status.st_mode & 0o022 or status.st_size > MAX_FILE_BYTES:
            return b""
        return file.read(MAX_FILE_BYTES)


def _make_room(folder: Path, *, besides: str) -> None:
    """Remove the files of stores that were listed longest ago."""
    with os.scandir(folder) as found:
        held = [
            (item.stat(follow_symlinks=False).st_mtime, item.path)
            for item in found
            if _OWN_NAME.fullmatch(item.name)
            and item.name != besides
            and item.is_file(follow_symlinks=False)
        ]
    for _, path in sorted(held)[: max(0, len(held) - MAX_FILES + 1)]:
        with suppress(FileNotFoundError):
            os.unlink(path)
