"""Bytes to pixels, within limits of time and memory.

What a small image can cost is bounded by its size, and threads decode it. A large one may take
any time, and a thread cannot be stopped: it goes to a process that is killed when its time is up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dne_serve import decode_worker
from dne_serve.decode_worker import ANSWERED, ASKED, PIXELS, READY, TOO_LARGE
from model_store.errors import ImageRejected, ImageTooLarge
from model_store.manifest import Preprocessing
from model_store.preprocess import Pixels, check_size, fit_pixels, read_pixels

SMALL_BYTES = 256 << 10
SMALL_PIXELS = 1_000_000
# A usual progressive JPEG has ten scans; each one more costs as much as the whole image.
SCAN, FEW_SCANS = b"\xff\xda", 32
HEADER_BYTES = 64 << 10
# Not what the server's own environment holds: tokens, keys of the object store.
PASSED_ON = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
# Memory that numpy would set aside for every core counts against the limit of the process.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger("dne_serve.decoding")


class ImageTooSlow(ImageRejected):
    """It was not decoded in time, and its process was ended."""


class Decoder:
    """Large images wait for large images only: they have threads of their own."""

    def __init__(self, *, threads: int, seconds: float, max_pixels: int) -> None:
        self._small = ThreadPoolExecutor(threads, "decode")
        self._large = ThreadPoolExecutor(threads, "decode-large")
        self._processes: queue.LifoQueue[DecodeProcess] = queue.LifoQueue()
        self._max_pixels = max_pixels
        for _ in range(threads):
            self._processes.put(DecodeProcess(seconds=seconds, max_pixels=max_pixels))

    async def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        """ImageRejected, ImageTooLarge or ImageTooSlow for what cannot be had."""
        loop = asyncio.get_running_loop()
        pixels = await loop.run_in_executor(self._small, self._read_small, data, preprocessing)
        if pixels is None:
            pixels = await loop.run_in_executor(self._large, self._read_large, data, preprocessing)
        return pixels

    async def fit(self, pixels_HWC: Pixels, preprocessing: Preprocessing) -> Pixels:
        """The same of an image that came as pixels."""
        height, width = pixels_HWC.shape[:2]
        if height * width > self._max_pixels:
            raise ImageTooLarge(
                f"an image of {width}×{height} has more than {self._max_pixels} pixels"
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._small, fit_pixels, pixels_HWC, preprocessing)

    def stop(self) -> None:
        self._small.shutdown()
        self._large.shutdown()
        while not self._processes.empty():
            self._processes.get().stop()

    def _read_small(self, data: bytes, preprocessing: Preprocessing) -> Pixels | None:
        """None for an image that is not small; one that is too large is refused here."""
        if len(data) <= SMALL_BYTES and data.count(SCAN) <= FEW_SCANS:
            most = min(SMALL_PIXELS, self._max_pixels)
            try:
                return read_pixels(data, preprocessing, max_pixels=most)
            except ImageTooLarge:
                check_size(data, max_pixels=self._max_pixels)
        else:
            # Its beginning alone: reading on to the size may be what takes long.
            check_size(data[:HEADER_BYTES], max_pixels=self._max_pixels)
        return None

    def _read_large(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        process = self._processes.get()
        try:
            return process.read(data, preprocessing)
        finally:
            self._processes.put(process)


class DecodeProcess:
    """Started when it is first needed, and anew after it has died. One caller at a time."""

    def __init__(self, *, seconds: float, max_pixels: int) -> None:
        self._seconds = seconds
        self._max_pixels = max_pixels
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._seconds, end)
        timer.start()
        try:
            kind, payload = _exchange(process, data, preprocessing)
        except (OSError, EOFError) as error:
            raise self._verdict(late) from error
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self.stop()
        if kind == PIXELS:
            size = preprocessing.image_size
            return np.frombuffer(payload, dtype=np.uint8).reshape(size, size, 3)
        raise (ImageTooLarge if kind == TOO_LARGE else ImageRejected)(payload.decode())

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = _start(self._max_pixels)
        return self._process

    def _verdict(self, late: threading.Event) -> ImageRejected:
        code = self._process.wait() if self._process is not None else None
        self.stop()
        if late.is_set():
            return ImageTooSlow(f"an image that takes more than {self._seconds:g} s to decode")
        log.warning("an image ended the process that decoded it (%s)", code)
        return ImageRejected("an image that cannot be decoded")


def _start(max_pixels: int) -> subprocess.Popen[bytes]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", decode_worker.__name__, str(max_pixels)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**passed_on, **ONE_THREAD, "PYTHONPATH": path},
    )
    if process.stdout is None or process.stdout.read(len(READY)) != READY:
        process.kill()
        process.communicate()
        raise RuntimeError("the process that decodes large images does not start")
    return process


def _exchange(
    process: subprocess.Popen[bytes], data: bytes, preprocessing: Preprocessing
) -> tuple[int, bytes]:
    asked, answered = process.stdin, process.stdout
    if asked is None or answered is None:
        raise EOFError
    parameters = preprocessing.model_dump_json().encode()
    asked.write(ASKED.pack(len(parameters), len(data)))
    asked.write(parameters)
    asked.write(data)
    asked.flush()
    head = answered.read(ANSWERED.size)
    if len(head) < ANSWERED.size:
        raise EOFError
    kind, length = ANSWERED.unpack(head)
    payload = answered.read(length)
    if len(payload) < length:
        raise EOFError
    return kind, payload
