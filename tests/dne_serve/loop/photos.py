"""Pictures for tests of the inbox: smooth ones that look different, with or without metadata."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from dne_serve.inference.decode_worker import Reencoded, reencode

PLACE = "a camera in a garden"


def photo(seed: int, *, width: int = 48, height: int = 32) -> Image.Image:
    """A smooth picture, another one for every seed."""
    grid = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def encoded(picture: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    written = io.BytesIO()
    picture.save(written, kind, **options)
    return written.getvalue()


def with_metadata(picture: Image.Image, *, orientation: int = 1) -> bytes:
    """A JPEG with EXIF, a comment and a profile, and a secret after its end."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = PLACE
    exif.get_ifd(0x8825)[1] = "N"
    data = encoded(picture, exif=exif, comment=PLACE.encode(), icc_profile=PLACE.encode())
    return data + PLACE.encode()


class Here:
    """Re-encodes in the test's own process."""

    def __init__(self) -> None:
        self.stopped = False
        self.asked = 0

    def reencode(self, data: bytes) -> Reencoded:
        self.asked += 1
        return reencode(data, max_pixels=40_000_000)

    def stop(self) -> None:
        self.stopped = True
