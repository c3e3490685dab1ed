"""Run a process that decodes images, from the server's side: start it when first needed, kill it
when its time is up, and replace it when it has died."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time

import numpy as np

from dne_serve.errors import DecoderUnavailable
from dne_serve.inference import decode_worker
from dne_serve.inference.decode_worker import (
    ANSWERED,
    ASKED,
    PIXELS,
    READY,
    REENCODE,
    TOO_LARGE,
    Reencoded,
)
from model_store.errors import DneError, ImageRejected, ImageTooLarge
from model_store.host.children import StderrTail, ending, last_words
from model_store.preprocess import Pixels
from model_store.records.manifest import Preprocessing

START_S = 60.0
# The server's own environment also holds tokens and keys of the object store.
PASSED_ON = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
# The memory that numpy reserves for each thread counts against the limit of the process.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals that a decoder brings on itself. Any other came from outside."""

log = logging.getLogger("dne_serve.decoding")


class ImageTooSlow(ImageRejected):
    """An image that was not decoded in time, so that its process was ended."""


class DecodeProcess:
    """A process for one caller at a time, started when first needed and again after it has died."""

    def __init__(self, *, seconds: float, max_pixels: int, niceness: int = 0) -> None:
        self._seconds = seconds
        self._arguments = [str(max_pixels), str(seconds), str(niceness)]
        self._process: subprocess.Popen[bytes] | None = None
        self._said = StderrTail(None)

    def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        """Decode an image, or raise ImageRejected, ImageTooLarge, ImageTooSlow or
        DecoderUnavailable."""
        size = preprocessing.image_size
        payload = self._ask(data, preprocessing.model_dump_json().encode())
        return np.frombuffer(payload, dtype=np.uint8).reshape(size, size, 3)

    def reencode(self, data: bytes) -> Reencoded:
        """Write an image anew for the inbox, or raise as `read` does."""
        return Reencoded.unpack(self._ask(data, REENCODE))

    def _ask(self, data: bytes, parameters: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        assert self._process is not None
        try:
            kind, payload = _exchange(self._process, data, parameters, until=_in(self._seconds))
        except TimeoutError as error:
            self.stop()
            raise self._too_slow() from error
        except (OSError, EOFError) as error:
            raise self._verdict() from error
        if kind == PIXELS:
            return payload
        raise (ImageTooLarge if kind == TOO_LARGE else ImageRejected)(payload.decode())

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._said.join()

    def _start(self) -> None:
        try:
            self._process = process = _spawn(self._arguments)
        except OSError as error:
            log.error("no process to decode images can be started: %s", error)
            raise _unavailable("cannot be started") from error
        # Taken away from `communicate`, which would read the stream too.
        stream, process.stderr = process.stderr, None
        self._said = StderrTail(stream)
        try:
            ready = _read(process, len(READY), until=_in(START_S)) == READY
        except (TimeoutError, EOFError):
            ready = False
        if not ready:
            process.kill()
            code = process.wait()
            self.stop()
            self._log(logging.ERROR, "a process to decode images %s at its start: %s", code)
            raise _unavailable("cannot be started")

    def _verdict(self) -> DneError:
        code = self._process.wait() if self._process is not None else 0
        self.stop()
        if code == -signal.SIGXCPU:
            return self._too_slow()
        if -code in _CRASHES:
            self._log(
                logging.WARNING, "an image ended the process that decoded it, which %s: %s", code
            )
            return ImageRejected("an image that cannot be decoded")
        self._log(logging.ERROR, "a process that decoded an image %s: %s", code)
        return _unavailable("was ended by the system")

    def _log(self, level: int, message: str, code: int) -> None:
        log.log(level, message, ending(code), last_words(self._said.kept) or "it said nothing")

    def _too_slow(self) -> ImageTooSlow:
        return ImageTooSlow(f"an image that takes more than {self._seconds:g} s to decode")


def _unavailable(why: str) -> DecoderUnavailable:
    return DecoderUnavailable(f"the process that decodes images {why}; try again soon")


def _spawn(arguments: list[str]) -> subprocess.Popen[bytes]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", decode_worker.__name__, *arguments],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**passed_on, **_ONE_THREAD, "PYTHONPATH": path},
    )
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


def _in(seconds: float) -> float:
    return time.monotonic() + seconds


def _exchange(
    process: subprocess.Popen[bytes], data: bytes, parameters: bytes, *, until: float
) -> tuple[int, bytes]:
    """Send an image and read the answer. Raise TimeoutError when the time is up. The pipes do not
    block: a timer thread for each image would cost more than the exchange."""
    # One piece: a second one would wake the process twice.
    _write(process, ASKED.pack(len(parameters), len(data)) + parameters + data, until=until)
    kind, length = ANSWERED.unpack(_read(process, ANSWERED.size, until=until))
    return kind, _read(process, length, until=until)


def _write(process: subprocess.Popen[bytes], data: bytes, *, until: float) -> None:
    if process.stdin is None:
        raise EOFError
    pipe, rest = process.stdin.fileno(), memoryview(data)
    while rest:
        try:
            rest = rest[os.write(pipe, rest) :]
        except BlockingIOError:
            _wait(pipe, select.POLLOUT, until=until)


def _read(process: subprocess.Popen[bytes], length: int, *, until: float) -> bytes:
    if process.stdout is None:
        raise EOFError
    pipe, pieces = process.stdout.fileno(), []
    while length:
        _wait(pipe, select.POLLIN, until=until)
        piece = os.read(pipe, length)
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _wait(pipe: int, event: int, *, until: float) -> None:
    """Wait until a pipe is ready, or its other end is closed."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
