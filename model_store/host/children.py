"""Keep the last words of a child process, and describe how it ended.

A child writes to stderr as much as it likes, of files and names that may be hostile: only the end
is kept, on one line and without control characters.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import IO

KEPT_BYTES = 4000
_LINE_CHARACTERS = 300


def last_words(stderr: bytes | str) -> str:
    """Return the end of a child's output as one printable line."""
    text = stderr if isinstance(stderr, str) else stderr.decode(errors="replace")
    lines = (_printable(line) for line in text[-KEPT_BYTES:].splitlines())
    return " | ".join(line for line in lines if line)


def last_line(stderr: bytes | str) -> str:
    """Return the last line of a child's output: with Python, the exception."""
    return last_words(stderr).rpartition(" | ")[2][:_LINE_CHARACTERS]


def ending(code: int, stderr: bytes | str = b"") -> str:
    """Describe how a child ended: `was ended by SIGILL`, `ended with 1: OSError: no such file`."""
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with {code}"
    reason = last_line(stderr)
    return f"{how}: {reason}" if reason else how


def end_of(path: Path) -> bytes:
    """Read the end of a file that a child wrote its stderr to."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - KEPT_BYTES))
        return file.read(KEPT_BYTES)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StderrTail(threading.Thread):
    """Read the stderr of a child all the time, so that the child never waits, and keep the end.

    `echo`, a file descriptor, gets all of it as it comes.
    """

    def __init__(self, stream: IO[bytes] | None, *, echo: int | None = None) -> None:
        super().__init__(name="child-said", daemon=True)
        self._stream, self._echo, self.kept = stream, echo, b""
        if stream is not None:
            self.start()

    def run(self) -> None:
        stream = self._stream
        while stream is not None and (piece := os.read(stream.fileno(), 1 << 16)):
            self.kept = (self.kept + piece)[-KEPT_BYTES:]
            self._pass_on(piece)
        if stream is not None:
            stream.close()

    def _pass_on(self, piece: bytes) -> None:
        if self._echo is None:
            return
        try:
            os.write(self._echo, piece)
        except OSError:  # the reader of `echo` is gone; the end is kept all the same
            self._echo = None

    def join(self, timeout: float | None = None) -> None:
        if self.ident is not None:
            super().join(timeout)


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in line).strip()
