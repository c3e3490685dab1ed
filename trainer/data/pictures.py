"""Hold the images of a set: pixels, and files of the store that are decoded when they are needed.

An image has a digest, by which its tokens are found again without its pixels. Know nothing of
torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from model_store.preprocess import encode_png, read_pixels
from model_store.records.manifest import Preprocessing

Pixels = NDArray[np.uint8]
Placed = TypeVar("Placed")

_DECODING_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An encoded image of the store."""

    data: bytes
    preprocessing: Preprocessing

    @property
    def digest(self) -> bytes:
        # The prefix keeps the bytes of a file apart from pixels that happen to be the same bytes.
        return hashlib.sha256(b"stored image" + self.data).digest()

    def decode(self) -> Pixels:
        return read_pixels(self.data, self.preprocessing)


class Pictures:
    """Images of one size, in order: an array of pixels, or a mixture of pixels and files."""

    __slots__ = ("_decoded", "_images", "_side")

    def __init__(self, images: Pixels | Sequence[Pixels | StoredImage], *, side: int) -> None:
        self._images, self._side = images, side
        self._decoded = images if isinstance(images, np.ndarray) else None

    @classmethod
    def of(cls, pixels_NHWC: Pixels) -> Pictures:
        return cls(pixels_NHWC, side=pixels_NHWC.shape[1])

    def __len__(self) -> int:
        return len(self._images)

    @property
    def pixels_NHWC(self) -> Pixels:
        """Decode all images, the first time."""
        if self._decoded is None:
            self._decoded = _decode(self._images, side=self._side)
        return self._decoded

    def pixels_of(self, row: int) -> Pixels:
        """Decode one image, and do not keep it."""
        image = self._images[row] if self._decoded is None else self._decoded[row]
        return image.decode() if isinstance(image, StoredImage) else image

    def encoded(self, row: int) -> bytes:
        """Encode an image without loss; one of the store is encoded already."""
        image = self._images[row]
        return image.data if isinstance(image, StoredImage) else encode_png(image)

    def is_stored(self, row: int) -> bool:
        """Return whether the store keeps an image, and it takes decoding to see its pixels."""
        return isinstance(self._images[row], StoredImage)

    def digests(self) -> list[bytes]:
        """Name each image: a file by its bytes, another image by its pixels."""
        return [
            image.digest if isinstance(image, StoredImage) else pixels_digest(image)
            for image in self._images
        ]

    def take(self, rows: NDArray[np.int64]) -> Pictures:
        if isinstance(self._images, np.ndarray):
            return Pictures(self._images[rows], side=self._side)
        taken = Pictures([self._images[row] for row in rows], side=self._side)
        taken._decoded = None if self._decoded is None else self._decoded[rows]
        return taken

    def joined(self, others: Sequence[Pictures]) -> Pictures:
        sets = [one for one in (self, *others) if len(one)] or [self]
        arrays = [
            image_set._images for image_set in sets if isinstance(image_set._images, np.ndarray)
        ]
        if len(arrays) == len(sets):
            return Pictures(np.concatenate(arrays), side=self._side)
        return Pictures(
            [image for image_set in sets for image in image_set._images], side=self._side
        )


def pixels_digest(pixels_HWC: Pixels) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(pixels_HWC).data).digest()


def _decode(images: Pixels | Sequence[Pixels | StoredImage], *, side: int) -> Pixels:
    pixels_NHWC = np.zeros((len(images), side, side, 3), dtype=np.uint8)

    def place(row: int) -> None:
        image = images[row]
        pixels_NHWC[row] = image.decode() if isinstance(image, StoredImage) else image

    for _ in in_threads(place, len(images)):
        pass
    return pixels_NHWC


def in_threads(place: Callable[[int], Placed], count: int) -> Iterator[Placed]:
    """Call `place` with each number below `count`, and yield its results in order."""
    pool = ThreadPoolExecutor(_DECODING_THREADS, thread_name_prefix="decode")
    try:
        yield from pool.map(place, range(count))
    finally:
        # Ctrl-C need not wait for images that no thread has begun to read.
        pool.shutdown(cancel_futures=True)
