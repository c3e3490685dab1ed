"""Build images of random structure from a list of numbers: the same numbers, the same image.

A search changes the numbers and keeps those whose image takes longest. Most images are valid enough
to be decoded; a few numbers decide on repetitions, so that small changes have large effects.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from tests.abuse import structures as made
from tests.abuse.images import encoded
from tests.abuse.structures import jpeg_segment, png_chunk

MOST_BYTES = 256 << 10
MOST_PIXELS = 1_000_000
One = TypeVar("One")


class Draws:
    """Reads numbers one after the other; after the last one comes 0 for ever."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def below(self, most: int) -> int:
        return next(self._numbers, 0) % most

    def about(self, most: int) -> int:
        """1 to `most`, small ones as likely as large ones."""
        share = (next(self._numbers, 0) & 0xFFFF) / 0xFFFF
        return max(1, round(math.exp(share * math.log(most))))

    def of(self, choices: Sequence[One]) -> One:
        return choices[self.below(len(choices))]

    def size(self, *, longest: int = 1 << 20) -> tuple[int, int]:
        """Width and height of about a million pixels or fewer, of any proportions."""
        width = min(longest, self.of([self.about(MOST_PIXELS), 1000, 1000]))
        height = min(longest, max(1, MOST_PIXELS // width // self.of([1, 1, 1, 1, 16, 999])))
        return width, height

    def bytes(self, most: int) -> bytes:
        length = self.about(most)
        if self.below(3):
            return bytes([self.below(256)]) * length
        return noise()[:length]


@cache
def noise() -> bytes:
    return np.random.default_rng(0).bytes(3 * MOST_PIXELS)


@lru_cache(maxsize=200)
def packed(data: bytes, level: int = 9) -> bytes:
    return zlib.compress(data, level)


def repeated(part: bytes, times: int) -> bytes:
    """As often as fits into a small file, and a little more."""
    return part * min(times, 1 + MOST_BYTES // max(1, len(part)))


def exif(draw: Draws) -> bytes:
    if draw.below(2):
        return made.exif_of_nested(draw.about(30_000))
    size, kind = draw.about(200_000), draw.of([7, 5, 3])
    return made.exif_of_large_tags(draw.about(10_000), size=size, kind=kind)


def photo(draw: Draws, mode: str, size: tuple[int, int]) -> Image.Image:
    """An image of noise that is coarse or fine, or of one colour."""
    detail = draw.of([1, 4, 64, 1000])
    small = (max(1, min(size[0], detail)), max(1, min(size[1], detail)))
    pixels = np.frombuffer(noise()[: small[0] * small[1] * 3], dtype=np.uint8)
    image = Image.fromarray(pixels.reshape(small[1], small[0], 3))
    return image.resize(size, Image.Resampling.NEAREST).convert(mode)


def png(draw: Draws) -> bytes:
    width, height = draw.size()
    depth, colour = draw.of([(1, 0), (8, 0), (16, 0), (8, 2), (16, 2), (1, 3), (2, 3), (4, 3),
                             (8, 3), (8, 4), (16, 4), (8, 6), (16, 6)])  # fmt: skip
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, draw.below(2))
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row = 1 + (width * depth * channels + 7) // 8
    rows = bytes([draw.below(5)]) + draw.bytes(row)[: row - 1].ljust(row - 1, b"\1")
    pixels = packed(rows * height, draw.of([0, 1, 1, 6]))[:MOST_BYTES]
    step = max(draw.about(len(pixels)), len(pixels) // 2000)
    parts = [
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header),
        png_chunk(b"PLTE", bytes(3 << min(depth, 8))) if colour == 3 else b"",
        *(_png_extra(draw) for _ in range(draw.below(6))),
        *(png_chunk(b"IDAT", pixels[at : at + step]) for at in range(0, len(pixels), step)),
        *(_png_extra(draw) for _ in range(draw.below(3))),
        png_chunk(b"IEND"),
    ]
    return b"".join(parts)


def _png_extra(draw: Draws) -> bytes:
    kind = draw.of([b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"tRNS", b"teSt", b"IDAT",
                    b"acTL", b"sPLT", b"PLTE", b"gAMA"])  # fmt: skip
    key = draw.of([b"k", b"exif", b"XML:com.adobe.xmp", b"Raw profile type exif", b"transparency"])
    text = packed(draw.bytes(1 << 20))
    body = {
        b"iCCP": b"p\0\0" + text,
        b"zTXt": key + b"\0\0" + text,
        b"iTXt": key + b"\0\1\0\0\0" + text,
        b"tEXt": key + b"\0" + draw.bytes(60_000),
    }.get(kind)
    if body is None:
        body = exif(draw) if kind == b"eXIf" else draw.bytes(768)
    return repeated(png_chunk(kind, body), draw.about(3000))


def jpeg(draw: Draws) -> bytes:
    width, height = draw.size(longest=65_000)
    image = photo(draw, draw.of(["L", "RGB", "CMYK"]), (width, height))
    options = {
        "quality": draw.of([1, 30, 75, 95]),
        "progressive": bool(draw.below(2)),
        "restart_marker_blocks": draw.of([0, 0, 1, 100]),
    }
    if image.mode == "RGB":
        options["subsampling"] = draw.below(3)
    data = encoded(image, "JPEG", **options)
    last = data[data.rindex(b"\xff\xda") : -2]
    between = b"" if draw.below(3) else _jpeg_extra(draw)
    data = data[:-2] + between + repeated(last, draw.of([0, draw.about(40)])) + b"\xff\xd9"
    extras = b"".join(_jpeg_extra(draw) for _ in range(draw.below(5)))
    return _sampled(draw, data[:2] + extras + data[2:])


def _jpeg_extra(draw: Draws) -> bytes:
    kind = draw.of([0xFE, 0xE0, 0xE1, 0xE2, 0xED, 0xDB, 0xDD, 0xC4, 0xFF])
    body = {
        0xE1: lambda: b"Exif\0\0" + exif(draw),
        0xE2: lambda: draw.of([b"ICC_PROFILE\0\1\1", b"MPF\0"]) + draw.bytes(65_000),
        0xED: lambda: b"Photoshop 3.0\0" + (b"8BIM" + bytes(8)) * draw.about(5000),
        0xDB: lambda: (bytes([draw.below(4)]) + b"\1" * 64) * draw.about(1000),
        0xDD: lambda: struct.pack(">H", draw.of([0, 1, 7])),
    }.get(kind, lambda: draw.bytes(65_000))()
    return repeated(jpeg_segment(kind, body[:65_500]), draw.about(3000))


def _sampled(draw: Draws, data: bytes) -> bytes:
    """Perhaps with another frame type, or other sampling factors."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if at < 0 or draw.below(3):
        return data
    changed = bytearray(data)
    changed[at + 1] = draw.of([0xC0, 0xC1, 0xC2, 0xC9, 0xCA])
    for component in range(min(changed[at + 9], 4)):
        changed[at + 11 + 3 * component] = draw.of([0x11, 0x22, 0x44, 0x14, 0x41])
    return bytes(changed)


def gif(draw: Draws) -> bytes:
    size = draw.size(longest=65_000)
    image = photo(draw, "P", size)
    data = encoded(image, "GIF", interlace=draw.below(2), **draw.of([{}, {"transparency": 0}]))
    at = data.index(b"\x2c", 13 + 3 * (2 << (data[10] & 7)))
    blocks = b"".join(_gif_extra(draw) for _ in range(draw.below(4)))
    changed = bytearray(data[:at] + blocks + data[at:])
    at += len(blocks)
    if not draw.below(3):
        struct.pack_into("<HHHH", changed, at + 1, *(draw.below(2000) for _ in range(4)))
    if not draw.below(3):  # other codes than the encoder wrote
        changed[at + 12 : at + 12] = draw.bytes(100_000)
    return bytes(changed)


def _gif_extra(draw: Draws) -> bytes:
    block = draw.bytes(255)[:255]
    blocks = bytes([len(block)]) + block
    label = draw.of([0xFE, 0xFF, 0xF9, 0x01])
    extension = bytes([0x21, label]) + repeated(blocks, draw.about(5000)) + b"\0"
    return repeated(extension, draw.about(1000))


def webp(draw: Draws) -> bytes:
    if not draw.below(3):
        side = draw.about(1000)
        blocks = ((side + 3) // 4) ** 2
        return made.webp_of_groups(side, groups=min(draw.about(50_000), blocks))
    size = draw.size(longest=16_383)
    image = photo(draw, draw.of(["RGB", "RGBA"]), size)
    options: dict[str, Any] = {
        "lossless": bool(draw.below(2)),
        "quality": draw.of([1, 80, 100]),
        "method": 0,
    }
    if not draw.below(3):
        options["exif"] = exif(draw)
    data = encoded(image, "WEBP", **options)
    kind, body = draw.of([b"XMP ", b"ICCP", b"teSt", b"ALPH", b"VP8 "]), draw.bytes(5000)
    chunk = kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) & 1)
    data += repeated(chunk, draw.of([0, draw.about(200)]))
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def bmp(draw: Draws) -> bytes:
    width, height = draw.size()
    bits = draw.of([1, 4, 8, 16, 24, 32])
    compression = draw.of([0, 0, 0, 1, 2, 3])
    colours = draw.of([0, 2, 256, draw.about(65_536)]) if bits <= 8 else 0
    body = bytes(4 * colours) + draw.of([b"\1\0", b"\0\0\1\0", b"\0\2\1\0", b"\xff\0", b"\7"])
    body = repeated(body, draw.about(MOST_BYTES)) if draw.below(2) else draw.bytes(MOST_BYTES)
    about = struct.pack(
        "<IiiHHIIiiII", 40, width, height * draw.of([1, -1]), 1, bits, compression, 0, 0, 0,
        colours, 0,
    )  # fmt: skip
    offset = draw.of([54, 54 + 4 * colours, draw.below(1000)])
    return b"BM" + struct.pack("<IHHI", 54 + len(body), 0, 0, offset) + about + body


def tiff(draw: Draws) -> bytes:
    if draw.below(2):
        return made.tiff_of_strips(draw.about(100_000), side=draw.about(1000))
    return draw.of([made.tiff_of_tiles, made.tiff_of_tags])(draw.about(250))


BUILDERS: dict[str, Callable[[Draws], bytes]] = {
    "JPEG": jpeg,
    "PNG": png,
    "WEBP": webp,
    "GIF": gif,
    "BMP": bmp,
    "TIFF": tiff,
}
