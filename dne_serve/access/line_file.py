"""Append whole lines to a file that other processes append to as well.

A disk that fills up takes a part of a line, and the part is cut off again. It stays while another
process is writing or if the file may only grow; then the next line begins after a line break.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIES = 20
PAUSE_S = 0.001
FLAGS = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class LineFile:
    """A file of lines. It is opened for every line, so that it may be rotated away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ours = threading.Lock()

    def check(self) -> None:
        """Raise OSError if the file cannot be written."""
        with self._opened():
            pass

    def append(self, line: bytes) -> None:
        """Append a line. Raise OSError if it is not in the file."""
        with self._ours, self._opened() as handle:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.write(handle, line + b"\n")  # a pipe or a terminal: nothing can be taken back
                return
            is_locked = _lock(handle)
            before = os.fstat(handle).st_size
            data = (b"\n" if _is_torn(handle, before) else b"") + line + b"\n"
            written = os.write(handle, data)  # at once: other writers cannot come in between
            if written < len(data):
                if is_locked:
                    os.ftruncate(handle, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            handle = os.open(self._path, os.O_RDWR | FLAGS, 0o600)
        except PermissionError:  # a file that we may write and not read
            handle = os.open(self._path, os.O_WRONLY | FLAGS, 0o600)
        try:
            yield handle
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Try for a moment to keep others from appending until the file is closed. A process that keeps
    the lock must not keep this one from writing."""
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return False  # the file system has no locks
        else:
            return True
    return False


def _is_torn(handle: int, size: int) -> bool:
    """Say whether the file ends within a line."""
    if size == 0:
        return False
    try:
        return os.pread(handle, 1, size - 1) != b"\n"
    except OSError as error:
        if error.errno == errno.EBADF:  # not open for reading
            return False
        raise
