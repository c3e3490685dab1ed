"""Write an audit line for every request to change something: who, when, from where, with what
result.

Lines are JSON. They go to the log, and to a file of their own if one is named. Refused requests
have lines too, up to a number each minute; the rest are counted.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_store.errors import WrongUsage
from model_store.records.sealing import timestamp

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
    """Return whether the file ends within a line."""
    if size == 0:
        return False
    try:
        return os.pread(handle, 1, size - 1) != b"\n"
    except OSError as error:
        if error.errno == errno.EBADF:  # not open for reading
            return False
        raise


MOST = 20
WINDOW_S = 60.0


class LogThrottle:
    """Limit on the events of each kind in a window of time."""

    def __init__(
        self,
        *,
        most: int = MOST,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window_s = window_s
        self._most = most
        self._clock = clock
        self._began = clock()
        self._seen: Counter[int] = Counter()
        self._left_out: Counter[int] = Counter()

    def admits(self, kind: int) -> bool:
        self._begin_anew_if(self._clock() >= self._began + self.window_s)
        self._seen[kind] += 1
        return self._seen[kind] <= self._most

    def take_left_out(self, *, also_now: bool = False) -> dict[int, int]:
        """Return once how many events of each kind were left out in past minutes; with `also_now`
        those of the current minute as well."""
        self._begin_anew_if(also_now or self._clock() >= self._began + self.window_s)
        taken, self._left_out = dict(self._left_out), Counter()
        return taken

    def _begin_anew_if(self, is_over: bool) -> None:
        if is_over:
            for kind, seen in self._seen.items():
                if seen > self._most:
                    self._left_out[kind] += seen - self._most
            self._began, self._seen = self._clock(), Counter()


MAX_TEXT = 1000

log = logging.getLogger("dne_serve.audit")


class Audit:
    """Audit log of the server."""

    def __init__(self, path: Path | None) -> None:
        """Raise WrongUsage for a file that cannot be written, before anything is served."""
        self._file = LineFile(path) if path is not None else None
        self._throttle = LogThrottle()
        self._telling: asyncio.TimerHandle | None = None
        if self._file is not None:
            try:
                self._file.check()
            except OSError as error:
                raise WrongUsage(f"the audit log {path} cannot be written") from error

    def note(self, action: str, **facts: Any) -> None:
        """Write one line, as JSON: nothing that a client sends can look like a line of its own."""
        bounded = {name: _bounded(value) for name, value in facts.items()}
        line = json.dumps({"time": timestamp(), "action": _bounded(action), **bounded})
        log.info("%s", line)
        if self._file is not None:
            try:
                self._file.append(line.encode())
            except OSError as error:  # the line is in the log; the change has happened
                log.error("the audit log cannot be written: %s", error)

    def note_refused(self, action: str, *, status: int | None, **facts: Any) -> None:
        """Write a line for a request without a valid token. Anybody can send any number of them, so
        some have lines and the rest are counted. To be called on the event loop."""
        self._tell_left_out()
        if self._throttle.admits(status or 0):
            self.note(action, status=status, **facts)
        elif self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(self._throttle.window_s, self._tell_left_out)

    def close(self) -> None:
        """Write the counts of requests that have no line yet."""
        self._tell_left_out(also_now=True)

    def _tell_left_out(self, *, also_now: bool = False) -> None:
        left_out = self._throttle.take_left_out(also_now=also_now)
        if left_out and self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for status, count in left_out.items():
            self.note("refused requests that have no line of their own", status=status, count=count)


def _bounded(value: Any) -> Any:
    return f"{value[:MAX_TEXT]} …" if isinstance(value, str) and len(value) > MAX_TEXT else value
