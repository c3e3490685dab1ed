"""Images with something wrong in them: the same ones for the same seed."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.abuse.images import heic_of_tiles

HOSTILE = Path(__file__).resolve().parents[3] / "shared/data/hostile-images"
MOST_BYTES = 40_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
NASTY = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def hostile_images() -> list[Path]:
    return sorted(path for path in HOSTILE.rglob("*") if path.is_file())


def real_images() -> list[bytes]:
    """One of each format and usual mode, and a few shapes."""
    pixels = np.random.default_rng(7).integers(0, 256, (24, 36, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels).resize((72, 48), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = [_encoded(photo, kind) for kind in FORMATS]
    made += [
        _encoded(photo, "JPEG", progressive=True, exif=exif),
        _encoded(photo.convert("L"), "JPEG"),
    ]
    made += [_encoded(photo.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA", "I;16")]
    made += [_encoded(photo.convert("CMYK"), kind) for kind in ("JPEG", "TIFF")]
    made += [
        _encoded(photo, "WEBP", lossless=True),
        _encoded(photo, "TIFF", compression="tiff_lzw"),
    ]
    made += [_encoded(photo, "TIFF", compression=name) for name in ("jpeg", "tiff_adobe_deflate")]
    made.append(_encoded(photo.convert("P"), "GIF", save_all=True, append_images=[photo]))
    made += [
        _encoded(photo, kind, save_all=True, append_images=[photo]) for kind in ("AVIF", "HEIF")
    ]
    made.append(heic_of_tiles())
    return made


def mutations(seeds: Sequence[bytes], *, count: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    kinds = (_flip, _set, _cut, _insert, _remove, _repeat, _integer, _splice)
    for _ in range(count):
        data = bytearray(chance.choice(seeds)[:MOST_BYTES])
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            if data:
                chance.choice(kinds)(data, chance, seeds)
        yield bytes(data) or b"?"  # nothing at all is no image, and 400


def _flip(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _set(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    data[_place(data, chance)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _cut(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    del data[_place(data, chance) :]


def _insert(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    at = _place(data, chance)
    data[at:at] = chance.randbytes(chance.choice((1, 2, 4, 16, 300)))


def _remove(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    at = _place(data, chance)
    del data[at : at + chance.choice((1, 2, 4, 16, 300))]


def _repeat(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    at = _place(data, chance)
    data[at:at] = bytes(data[at : at + chance.choice((2, 12, 64, 1000))]) * chance.choice((1, 2, 9))


def _integer(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    """A length, a size or an offset that makes no sense."""
    form = chance.choice((">H", "<H", ">I", "<I"))
    width = struct.calcsize(form)
    at = _place(data, chance)
    if at + width <= len(data):
        struct.pack_into(form, data, at, chance.choice(NASTY) & ((1 << 8 * width) - 1))


def _splice(data: bytearray, chance: random.Random, seeds: Sequence[bytes]) -> None:
    other = chance.choice(seeds)[:MOST_BYTES]
    at = _place(data, chance)
    data[at:] = other[chance.randrange(len(other) + 1) :]


def _place(data: bytearray, chance: random.Random) -> int:
    """Anywhere, but often near the beginning, where the headers are."""
    if not data:
        return 0
    return chance.randrange(min(len(data), chance.choice((64, 512, len(data)))) or 1)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
