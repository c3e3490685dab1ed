"""Read an image's outline: its size, and whether its structure bounds the work of decoding it.

A hostile file of few bytes and pixels may take minutes to decode, so chunks, markers, blocks and
tags are counted here first. Structures of ordinary writers are plain, all others are odd. Walks end
at a count and allocate nothing by a size in the file (`docs/adr/030-cheap-by-structure.md`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ENTRIES, OUTSIDE_BYTES, VALUES = 512, 256 << 10, 1024
"""Limits of cheap EXIF data: tags, bytes that tags point to, and values that become Python objects
one by one. A camera writes about 60 tags and 200 values."""
POINTERS = frozenset({0x8769, 0x8825, 0xA005})
"""Tags whose value is the place of another directory: Exif, GPS, interoperability."""
DEEPEST = 3
WIDTH, HEIGHT = 256, 257
LONG = 4
UNIT_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Bytes of one value by the number of its type; at most 8 for types that are not listed."""
AS_ONE = frozenset({1, 2, 6, 7})
"""Types whose values are read as one string of bytes."""
SIZE_TAGS = 64
"""Tags are sorted: width and height are among the first."""
EXIF_HEAD = b"Exif\0\0"


@dataclass(frozen=True, slots=True)
class TiffLayout:
    """The byte order of a file, and whether its directories have the large form of BigTIFF."""

    order: str
    is_big: bool

    @classmethod
    def of(cls, data: bytes) -> TiffLayout | None:
        order = {b"II": "<", b"MM": ">"}.get(data[:2])
        if order is None or len(data) < 16:
            return None
        (kind,) = struct.unpack_from(f"{order}H", data, 2)
        return cls(order, kind == 43) if kind in (42, 43) else None

    def first(self, data: bytes) -> int:
        code, at = ("Q", 8) if self.is_big else ("I", 4)
        return int(struct.unpack_from(f"{self.order}{code}", data, at)[0])

    def entries(self, data: bytes, at: int, *, most: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tag, type and count of each entry, and the place of its value field. Entries
        beyond the end of the data or after `most` are left out."""
        head, entry = (f"{self.order}{'Q' if self.is_big else 'H'}",
                       f"{self.order}HH{'Q' if self.is_big else 'I'}")  # fmt: skip
        step = 20 if self.is_big else 12
        if at + struct.calcsize(head) > len(data):
            return
        (count,) = struct.unpack_from(head, data, at)
        at += struct.calcsize(head)
        for _ in range(min(count, most, (len(data) - at) // step)):
            yield *struct.unpack_from(entry, data, at), at + struct.calcsize(entry)
            at += step


def tiff_size(data: bytes) -> tuple[int, int]:
    """Read the width and height of a TIFF's first picture; zeros if the file does not say."""
    layout = TiffLayout.of(data)
    if layout is None:
        return 0, 0
    found = {WIDTH: 0, HEIGHT: 0}
    for tag, kind, _, at in layout.entries(data, layout.first(data), most=SIZE_TAGS):
        if tag in found and kind in (3, 4) and at + 4 <= len(data):
            (found[tag],) = struct.unpack_from(layout.order + "HI"[kind - 3], data, at)
    return found[WIDTH], found[HEIGHT]


@dataclass(slots=True)
class Budget:
    """The rest of each limit while directories are walked."""

    entries: int = ENTRIES
    outside_bytes: int = OUTSIDE_BYTES
    values: int = VALUES
    pointed: list[tuple[int, int]] = field(default_factory=list)
    """Directories to come: their place, and how deep they are."""

    def take(self, kind: int, count: int) -> None:
        size = UNIT_BYTES.get(kind, 8) * count
        self.entries -= 1
        self.outside_bytes -= size if size > 4 else 0
        self.values -= 0 if kind in AS_ONE else count

    @property
    def is_spent(self) -> bool:
        return min(self.entries, self.outside_bytes, self.values) < 0


def is_cheap_exif(data: bytes) -> bool:
    """Return whether reading and writing all of this EXIF data is little work."""
    data = data.removeprefix(EXIF_HEAD).removeprefix(EXIF_HEAD)
    layout = TiffLayout.of(data)
    if layout is None or layout.is_big:
        return False
    budget = Budget(pointed=[(layout.first(data), 1)])
    while budget.pointed:
        at, depth = budget.pointed.pop()
        if depth > DEEPEST or not _walk(data, layout, at, depth, budget):
            return False
    return True


def _walk(data: bytes, layout: TiffLayout, at: int, depth: int, budget: Budget) -> bool:
    for tag, kind, count, value_at in layout.entries(data, at, most=ENTRIES + 1):
        budget.take(kind, count)
        if budget.is_spent:
            return False
        if tag in POINTERS:
            if (kind, count) != (LONG, 1) or value_at + 4 > len(data):
                return False
            (place,) = struct.unpack_from(f"{layout.order}I", data, value_at)
            budget.pointed.append((place, depth + 1))
    return True


CHUNKS, BYTES_A_CHUNK = 256, 4096
"""A PNG is plain with this many chunks, and one more for each 4 KiB of it."""
INFLATED_CHUNKS = 8
"""Each may inflate to 1 MiB, which takes Pillow 3 ms."""
MARKERS = 128
SCANS = 24
"""A usual progressive JPEG has ten scans; each one more costs as much as the whole image."""
SUB_BLOCKS = 1024
RIFF_CHUNKS = 64
BOXES = 1024
COLOURS = 256
LOSSLESS_WORK = 16
"""A lossless WebP may have Huffman codes of its own for every 16 pixels, which cost as much as
decoding 200 usual ones."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The size of an image, and a bound on the work of decoding it."""

    width: int = 0
    height: int = 0
    """Zero if the file does not say."""
    is_plain: bool = True
    """Whether work is bounded by pixels and bytes."""
    work_a_pixel: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def work(self) -> int:
        """Bound the cost of decoding, in pixels of an ordinary image."""
        return self.pixels * self.work_a_pixel


NO_IMAGE = Outline()
"""Outline of a file without the signature of an accepted format. It will not be decoded."""


def read_outline(data: bytes) -> Outline:
    """Read the outline without fail: that of a truncated file describes the part that is there."""
    reader = _boxes if data[4:8] == b"ftyp" else _READERS.get(data[:2])
    if reader is None:
        return NO_IMAGE
    try:
        return reader(data)
    except (struct.error, IndexError):  # it ends in the middle of a header
        return Outline(is_plain=False)


# PNG: chunks

_PNG_CHUNK = struct.Struct(">I4s")
_PNG_INFLATED = frozenset({b"iCCP", b"zTXt", b"iTXt"})
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_PNG_CRITICAL = frozenset({b"PLTE", b"IDAT"})
_PNG_ANIMATED = frozenset({b"acTL", b"fcTL", b"fdAT"})
_EXIF_KEYS = (b"exif\0", b"Raw profile type exif\0")
"""Texts that Pillow reads as EXIF data."""


def _png(data: bytes) -> Outline:
    width, height = struct.unpack_from(">II", data, 16)
    return Outline(width, height, _is_plain_png(data))


def _is_plain_png(data: bytes) -> bool:
    if data[12:16] != b"IHDR":
        return False
    left, inflated, exifs = CHUNKS + len(data) // BYTES_A_CHUNK, INFLATED_CHUNKS, 1
    at, end = 8 + 12 + _PNG_CHUNK.unpack_from(data, 8)[0], len(data) - 8
    while at <= end:
        length, kind = _PNG_CHUNK.unpack_from(data, at)
        left -= 1
        if kind == b"IEND":
            break
        if kind not in _PNG_CRITICAL:
            if kind[:1].isupper() or kind in _PNG_ANIMATED:
                return False
            inflated -= kind in _PNG_INFLATED
            exifs -= kind == b"eXIf"
            if not _is_plain_metadata(data, kind, at + 8, length):
                return False
        if min(left, inflated, exifs) < 0:
            return False
        at += 12 + length
    return True


def _is_plain_metadata(data: bytes, kind: bytes, at: int, length: int) -> bool:
    if kind == b"eXIf":
        return is_cheap_exif(data[at : at + length])
    return kind not in _PNG_TEXTS or not data.startswith(_EXIF_KEYS, at)


# JPEG: markers

_SOS, _APP1, _APP2 = 0xDA, 0xE1, 0xE2
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Huffman-coded, sequential or progressive. Arithmetic coding and others are odd."""
_JPEG_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Tables, the restart interval, comments, and data of applications."""


def _jpeg(data: bytes) -> Outline:
    width = height = 0
    exifs, left, at = 1, MARKERS, 2
    while at + 4 <= len(data):
        begins, marker, length = struct.unpack_from(">BBH", data, at)
        left -= 1
        if begins != 0xFF or length < 2 or left < 0:
            return Outline(width, height, is_plain=False)
        if marker == _SOS:
            return Outline(width, height, data.count(b"\xff\xda", at) <= SCANS)
        if marker in _JPEG_FRAMES and not width:
            height, width = struct.unpack_from(">HH", data, at + 5)
        elif marker not in _JPEG_SEGMENTS:
            return _odd_jpeg(data, at)
        if marker == _APP1 and data.startswith(b"Exif\0\0", at + 4):
            exifs -= 1
            if exifs < 0 or not is_cheap_exif(data[at + 4 : at + 2 + length]):
                return _odd_jpeg(data, at + 2 + length)
        elif marker == _APP2 and data.startswith(b"MPF\0", at + 4):
            return _odd_jpeg(data, at + 2 + length)
        at += 2 + length
    return Outline(width, height)


def _odd_jpeg(data: bytes, at: int) -> Outline:
    """Read the size of an odd JPEG: an image that is too large needs no process."""
    for _ in range(MARKERS):
        if at + 9 > len(data) or data[at] != 0xFF:
            break
        if 0xC0 <= data[at + 1] <= 0xCF and data[at + 1] not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Outline(width, height, is_plain=False)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return Outline(is_plain=False)


# GIF: blocks, up to the first picture

_GIF_EXTENSION, _GIF_PICTURE, _GIF_END, _GIF_COMMENT = 0x21, 0x2C, 0x3B, 0xFE


def _gif(data: bytes) -> Outline:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    left = SUB_BLOCKS
    while at < len(data) and data[at] != _GIF_END:
        if data[at] == _GIF_PICTURE:
            x, y, across, down = struct.unpack_from("<HHHH", data, at + 1)
            return Outline(max(width, x + across), max(height, y + down))
        if data[at] != _GIF_EXTENSION or left < 0 or _misleads(data, at):
            return Outline(width, height, is_plain=False)
        at += 2
        while at < len(data) and data[at] and left >= 0:
            at += 1 + data[at]
            left -= 1
        at += 1
        left -= 1
    return Outline(width, height)


def _misleads(data: bytes, at: int) -> bool:
    """Return whether the extension ends before the blocks that Pillow expects in it. Pillow then
    reads past its end, and sees other blocks than are counted here."""
    label, first = data[at + 1], data[at + 2]
    if label == _GIF_COMMENT:
        return False
    return not first or (data.startswith(b"NETSCAPE2.0", at + 3) and not data[at + 3 + first])


# BMP: one header

_BMP_HEADERS = frozenset({40, 52, 56, 64, 108, 124})
_RAW, _BIT_FIELDS = 0, 3


def _bmp(data: bytes) -> Outline:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return Outline(width, height)
    if header not in _BMP_HEADERS:
        return Outline()  # Pillow reads no further
    width, height, _, _, compression = struct.unpack_from("<IIHHI", data, 18)
    (colours,) = struct.unpack_from("<I", data, 46)
    if height >> 24 == 0xFF:  # from top to bottom
        height = 2**32 - height
    # Pillow decodes runs in Python.
    is_plain = compression in (_RAW, _BIT_FIELDS) and colours <= COLOURS
    return Outline(width, height, is_plain)


# WebP: RIFF chunks

_RIFF_CHUNK = struct.Struct("<4sI")
_ANIMATED = 0x02
_LOSSLESS = frozenset({b"VP8L", b"ALPH"})


def _webp(data: bytes) -> Outline:
    if data[8:12] != b"WEBP":
        return NO_IMAGE
    width, height = _webp_size(data)
    lossless, exifs, at = False, 1, 12
    for _ in range(RIFF_CHUNKS):
        if at + 8 > len(data):
            return Outline(width, height, work_a_pixel=LOSSLESS_WORK if lossless else 1)
        kind, length = _RIFF_CHUNK.unpack_from(data, at)
        lossless |= kind in _LOSSLESS
        exifs -= kind == b"EXIF"
        if exifs < 0 or not _is_plain_riff(data, kind, at + 8, length):
            break
        at += 8 + length + (length & 1)
    return Outline(width, height, is_plain=False)


def _is_plain_riff(data: bytes, kind: bytes, at: int, length: int) -> bool:
    if kind == b"EXIF":
        return is_cheap_exif(data[at : at + length])
    if kind == b"VP8X":
        return not data[at] & _ANIMATED
    return kind != b"ANMF"


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _u24(data, 24) + 1, _u24(data, 27) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _u24(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")


# TIFF: a list of strips may name one of them any number of times, so that no TIFF is plain.


def _tiff(data: bytes) -> Outline:
    return Outline(*tiff_size(data), is_plain=False)


# AVIF and HEIC: boxes. Few bytes of either codec can describe much work, so that none is plain.

_BOX = struct.Struct(">I4s")
_OPENED_BOXES = {b"meta": 4, b"iprp": 0, b"ipco": 0}
"""Boxes around the sizes of pictures, and the bytes in each before its own boxes."""


def _boxes(data: bytes) -> Outline:
    """Read the largest size in the file. A picture of tiles has one, and so has each tile."""
    sizes, at = [(0, 0)], 0
    for _ in range(BOXES):
        if at + _BOX.size > len(data):
            break
        (length, kind), head = _BOX.unpack_from(data, at), _BOX.size
        if length == 1:
            (length,), head = struct.unpack_from(">Q", data, at + head), 16
        if kind == b"ispe":
            sizes.append(struct.unpack_from(">II", data, at + head + 4))
        inside = _OPENED_BOXES.get(kind)
        if inside is None and length < head:  # 0: the box ends with the file
            break
        at += length if inside is None else head + inside
    width, height = max(sizes, key=math.prod)
    return Outline(width, height, is_plain=False)


_READERS: dict[bytes, Callable[[bytes], Outline]] = {
    b"\x89P": _png,
    b"\xff\xd8": _jpeg,
    b"GI": _gif,
    b"BM": _bmp,
    b"RI": _webp,
    b"II": _tiff,
    b"MM": _tiff,
}
