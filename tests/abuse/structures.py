"""Small images whose structure makes them slow: few bytes, few pixels, and much work."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image

from tests.abuse.images import encoded

PNG_HEADER_END = 33


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def png_with(chunks: bytes, *, size: tuple[int, int] = (8, 8), mode: str = "L") -> bytes:
    """A small PNG with chunks of its own between header and pixels."""
    image = encoded(Image.new(mode, size, 1), "PNG")
    return image[:PNG_HEADER_END] + chunks + image[PNG_HEADER_END:]


def png_of_profiles(count: int) -> bytes:
    """Each profile inflates to 1 MiB, the most that Pillow takes."""
    return png_with(png_chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes((1 << 20) - 1), 9)) * count)


def png_of_texts(count: int, *, kind: bytes = b"zTXt") -> bytes:
    body = zlib.compress(b" " * ((1 << 20) - 1), 9)
    head = b"k\0\0" if kind == b"zTXt" else b"k\0\1\0\0\0"
    return png_with(png_chunk(kind, head + body) * count)


def png_of_empty_pixels(count: int) -> bytes:
    """Empty IDAT chunks before the one with the pixels."""
    return png_with(png_chunk(b"IDAT") * count)


# Directories of tags: TIFF files, and the EXIF data of other formats.

Entry = tuple[int, int, int, int]
"""Tag, type, count, and the value or where it is."""


def directory(entries: Sequence[Entry], *, following: int = 0) -> bytes:
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", following)


def tiff(entries: Sequence[Entry], *, before: bytes = b"") -> bytes:
    """A TIFF with its directory after `before`, which begins at byte 8."""
    return b"II*\0" + struct.pack("<I", 8 + len(before)) + before + directory(sorted(entries))


def tiff_of_strips(count: int, *, side: int = 1000) -> bytes:
    """Bilevel, with two strips that cover it, named again and again."""
    return tiff(
        [
            (256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 1), (259, 3, 1, 1), (262, 3, 1, 1),
            (273, 3, count, 8), (277, 3, 1, 1), (278, 3, 1, side // 2),
        ],
        before=struct.pack("<H", 8) * count + bytes(max(0, side * side // 16 - 2 * count)),
    )  # fmt: skip


def tiff_of_tiles(side: int) -> bytes:
    """Tiles of one pixel."""
    count = side * side
    before = b"\0" * 16 + struct.pack("<H", 8) * count + struct.pack("<H", 1) * count
    return tiff(
        [
            (256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
            (277, 3, 1, 1), (322, 3, 1, 1), (323, 3, 1, 1), (324, 3, count, 24),
            (325, 3, count, 24 + 2 * count),
        ],
        before=before,
    )  # fmt: skip


def tiff_of_tags(count: int) -> bytes:
    """Tags that nobody knows, of types that nobody knows, beside a picture."""
    usual: list[Entry] = [
        (256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1),
        (273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 8),
    ]  # fmt: skip
    odd: list[Entry] = [(40_000 + n, 77, 1 << 20, 8) for n in range(count)]
    return tiff([*usual, *odd], before=bytes(64))


def exif_of_large_tags(count: int, *, size: int, kind: int = 7) -> bytes:
    """Each tag says that all of the data is its value."""
    unit = {7: 1, 5: 8, 3: 2}[kind]
    entries = [(50_000 + n, kind, size // unit, 0) for n in range(count)]
    data = b"II*\0" + struct.pack("<I", 8) + directory([(274, 3, 1, 6), *entries])
    return data + bytes(max(0, size - len(data)))


def exif_of_nested(rationals: int) -> bytes:
    """Turned, with an Exif directory that is read when the image is turned upright."""
    first = directory([(274, 3, 1, 6), (0x8769, 4, 1, 8 + 2 + 24 + 4)])
    at = 8 + len(first) + 2 + 12 + 4
    second = directory([(0x9201, 5, rationals, at)])
    values = b"".join(struct.pack("<II", 2**31 + n, 2**31 - n) for n in range(rationals))
    return b"II*\0" + struct.pack("<I", 8) + first + second + values


def jpeg_segment(marker: int, data: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg_with(segments: bytes, *, size: tuple[int, int] = (8, 8), **options: object) -> bytes:
    """A small JPEG with segments of its own right after its beginning."""
    image = encoded(Image.new("RGB", size, (9, 99, 199)), "JPEG", **options)
    return image[:2] + segments + image[2:]


def jpeg_with_exif(exif: bytes) -> bytes:
    return jpeg_with(jpeg_segment(0xE1, b"Exif\0\0" + exif))


def png_with_exif(exif: bytes) -> bytes:
    return png_with(png_chunk(b"eXIf", exif))


def bmp_of_runs(width: int, height: int, *, runs: bytes, kind: int = 1, bits: int = 8) -> bytes:
    colours = 1 << bits
    offset = 14 + 40 + 4 * colours
    head = b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset)
    about = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, kind, len(runs), 0, 0, 0, 0)
    return head + about + bytes(4 * colours) + runs


def webp_of_groups(side: int, *, groups: int) -> bytes:
    """Lossless, with a set of Huffman codes of its own for each block of 4×4 pixels."""
    bits = _Bits()
    bits.put(0x2F, 8)
    bits.put(side - 1, 14)
    bits.put(side - 1, 14)
    bits.put(0, 4)  # no alpha, version 0
    bits.put(0, 1)  # no transform
    bits.put(0, 1)  # no colour cache
    bits.put(1, 1)  # several groups …
    bits.put(0, 3)  # … one for each block of 4×4
    bits.put(0, 1)  # the image of groups has no colour cache
    _uniform(bits)  # green: the low byte of the group
    _uniform(bits)  # red: the high byte
    for _ in range(3):
        _single(bits)
    blocks = ((side + 3) // 4) ** 2
    for block in range(blocks):
        group = min(block, groups - 1)
        bits.put(_reversed(group & 255), 8)
        bits.put(_reversed(group >> 8), 8)
    for _ in range(groups * 5):
        _single(bits)
    return _riff(b"VP8L", bits.bytes())


class _Bits:
    def __init__(self) -> None:
        self._out = bytearray()
        self._value = self._used = 0

    def put(self, value: int, count: int) -> None:
        self._value |= value << self._used
        self._used += count
        while self._used >= 8:
            self._out.append(self._value & 255)
            self._value >>= 8
            self._used -= 8

    def bytes(self) -> bytes:
        return bytes(self._out) + bytes([self._value & 255, 0, 0, 0])


def _single(bits: _Bits) -> None:
    """A code of one symbol, 0, which takes no bits in the pixels."""
    bits.put(1, 1)
    bits.put(0, 1)
    bits.put(0, 1)
    bits.put(0, 1)


def _uniform(bits: _Bits) -> None:
    """A code in which each of the first 256 symbols has 8 bits."""
    order = (17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8)
    bits.put(0, 1)
    bits.put(len(order) - 4, 4)
    for symbol in order:
        bits.put(1 if symbol == 8 else 0, 3)
    bits.put(1, 1)  # not all symbols
    bits.put(3, 3)  # in 8 bits
    bits.put(256 - 2, 8)


def _reversed(byte: int) -> int:
    return int(f"{byte:08b}"[::-1], 2)


def _riff(kind: bytes, data: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) & 1)
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def gif_with(blocks: bytes, *, size: tuple[int, int] = (8, 8)) -> bytes:
    """A small GIF with blocks of its own before the picture."""
    image = encoded(Image.new("P", size, 1), "GIF")
    at = image.index(b"\x2c", 13 + 3 * (2 << (image[10] & 7)))
    return image[:at] + blocks + image[at:]


def animated(kind: str, *, frames: int, size: tuple[int, int] = (16, 16)) -> bytes:
    images = [Image.new("RGB", size, (90 * n % 256, n % 256, n // 256)) for n in range(frames)]
    buffer = io.BytesIO()
    images[0].save(buffer, kind, save_all=True, append_images=images[1:])
    return buffer.getvalue()
