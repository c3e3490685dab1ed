"""Read directories of tags (TIFF files, EXIF data) without their values, and bound the work of a
reader of all values. Nothing is allocated by a size that a file names."""

from __future__ import annotations

import struct
from collections.abc import Iterator
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
class Layout:
    """The byte order of a file, and whether its directories have the large form of BigTIFF."""

    order: str
    is_big: bool

    @classmethod
    def of(cls, data: bytes) -> Layout | None:
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
    layout = Layout.of(data)
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
    """Say whether reading and writing all of this EXIF data is little work."""
    data = data.removeprefix(EXIF_HEAD).removeprefix(EXIF_HEAD)
    layout = Layout.of(data)
    if layout is None or layout.is_big:
        return False
    budget = Budget(pointed=[(layout.first(data), 1)])
    while budget.pointed:
        at, depth = budget.pointed.pop()
        if depth > DEEPEST or not _walk(data, layout, at, depth, budget):
            return False
    return True


def _walk(data: bytes, layout: Layout, at: int, depth: int, budget: Budget) -> bool:
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
