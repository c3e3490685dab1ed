"""Decode image files to pixels, within limits of time and memory.

A thread cannot be stopped, so threads decode an image only if its outline shows that it is cheap.
Processes that can be killed decode all other images, in two lanes: large images of plain structure,
such as photos, never wait for odd ones.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from dne_serve.errors import QueueFull
from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.image_outline import Outline, read_outline
from model_store.errors import ImageTooLarge
from model_store.preprocess import Pixels, fit_pixels, read_pixels
from model_store.records.manifest import Preprocessing

SMALL_BYTES = 256 << 10
SMALL_PIXELS = 1_000_000
LONG_SIDE = 1 << 15
"""Each row has a cost of its own beside that of its pixels."""
ODD_NICENESS = 5
"""Odd images give way to the network and to all others."""


class Picture(Protocol):
    """One image of a request: a file or pixels."""

    @property
    def filename(self) -> str | None: ...

    async def read(self, decoder: Decoder, preprocessing: Preprocessing) -> Pixels:
        """Return the pixels that the network sees, or raise ImageRejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An image file, still encoded."""

    filename: str | None
    data: bytes

    async def read(self, decoder: Decoder, preprocessing: Preprocessing) -> Pixels:
        return await decoder.read(self.data, preprocessing)


class FairTurns:
    """So many turns at a time for all. While none is free, those who wait are served in turn: one
    that waits often delays each of the others by one turn. Used on the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, who: Hashable) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it was given at the same moment
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            who = next(iter(self._waiting))
            turns = self._waiting.pop(who)
            turn = turns.popleft()
            if turns:
                self._waiting[who] = turns  # at the end
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Decoder:
    """Threads for cheap images, and two lanes of processes for the others."""

    def __init__(
        self, *, threads: int, seconds: float, max_pixels: int, max_queue: int, max_images: int
    ) -> None:
        """Give large images half of `max_queue`, the queue of the whole server, and odd images a
        quarter, so that neither keeps small ones out. Each lane has room for `max_images`, the
        largest request."""
        self._small = ThreadPoolExecutor(threads, "decode")
        self.lanes = 3 * threads
        """Images that are decoded at a time at most, in threads and in processes."""

        def processes(niceness: int) -> list[DecodeProcess]:
            return [
                DecodeProcess(seconds=seconds, max_pixels=max_pixels, niceness=niceness)
                for _ in range(threads)
            ]

        self.large = DecodePool("large", processes(0), room=max(max_images, max_queue // 2))
        self.odd = DecodePool("odd", processes(ODD_NICENESS), room=max(max_images, max_queue // 4))
        self._max_pixels = max_pixels

    async def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        """Decode and scale an image file. Raise ImageRejected, ImageTooLarge or ImageTooSlow for
        a bad image; QueueFull or DecoderUnavailable if the client should try again."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._small, self._read_small, data, preprocessing)
        return await found.read(data, preprocessing) if isinstance(found, DecodePool) else found

    async def fit(self, pixels_HWC: Pixels, preprocessing: Preprocessing) -> Pixels:
        """Scale an image that came as pixels."""
        height, width = pixels_HWC.shape[:2]
        self._check_pixels(width, height)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._small, fit_pixels, pixels_HWC, preprocessing)

    def stop(self) -> None:
        self._small.shutdown()
        self.large.stop()
        self.odd.stop()

    def _read_small(self, data: bytes, preprocessing: Preprocessing) -> Pixels | DecodePool:
        """Decode a cheap image, or choose the lane of another. Refuse one that is too large."""
        outline = read_outline(data)
        self._check_pixels(outline.width, outline.height)
        if not is_cheap(outline, size_bytes=len(data)):
            return self.large if outline.is_plain else self.odd
        try:
            return read_pixels(data, preprocessing, max_pixels=min(SMALL_PIXELS, self._max_pixels))
        except ImageTooLarge:  # Pillow has read another size, or the limit is lower
            return self.odd

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self._max_pixels:
            raise ImageTooLarge(
                f"an image of {width}×{height} has more than {self._max_pixels} pixels"
            )


def is_cheap(outline: Outline, *, size_bytes: int) -> bool:
    """Return whether a thread may decode the image."""
    return (
        outline.is_plain
        and size_bytes <= SMALL_BYTES
        and outline.work <= SMALL_PIXELS
        and max(outline.width, outline.height) <= LONG_SIDE
    )


class DecodePool:
    """Processes for images of one kind, each with a thread that waits for it. Used on the event
    loop."""

    def __init__(self, kind: str, processes: Sequence[DecodeProcess], *, room: int) -> None:
        self._kind = kind
        self._room = room
        self._within = 0
        self._threads = ThreadPoolExecutor(len(processes), f"decode-{kind}")
        self.processes: queue.LifoQueue[DecodeProcess] = queue.LifoQueue()
        for process in processes:
            self.processes.put(process)

    async def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        if self._within >= self._room:
            raise QueueFull(
                f"{self._room} {self._kind} images are waiting to be decoded; try again soon"
            )
        loop = asyncio.get_running_loop()
        self._within += 1
        try:
            return await loop.run_in_executor(self._threads, self._read, data, preprocessing)
        finally:
            self._within -= 1

    def stop(self) -> None:
        self._threads.shutdown()
        while not self.processes.empty():
            self.processes.get().stop()

    def _read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        process = self.processes.get()
        try:
            return process.read(data, preprocessing)
        finally:
            self.processes.put(process)
