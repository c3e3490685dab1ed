"""Images made to hurt: few bytes that say they are many pixels, and few pixels that take long."""

from __future__ import annotations

import gzip
import io
import re
import struct
import zlib

from PIL import Image
from pillow_heif import register_heif_opener

register_heif_opener(decode_threads=1)  # Pillow writes HEIC by its aid: save(…, "HEIF")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def flat(width: int, height: int, *, mode: str = "P", kind: str = "PNG") -> bytes:
    """A real image, of one colour: a small file with many pixels."""
    return encoded(Image.new(mode, (width, height), 1), kind)


# Bombs: what they say they are is more than anybody would decode.


def png_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A header only, and no pixels worth the name."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND")
    )


def gif_bomb(width: int = 65_535, height: int = 65_535) -> bytes:
    small = flat(8, 8, kind="GIF")
    return small[:6] + struct.pack("<HH", width, height) + small[10:]


def bmp_bomb(width: int = 100_000, height: int = 100_000) -> bytes:
    return _bmp(width, height, runs=b"\x01\x00" * 10)


def webp_bomb(width: int = 16_383, height: int = 16_383) -> bytes:
    """Lossless WebP: fourteen bits each for width and height, minus one."""
    small = encoded(Image.new("RGB", (8, 8)), "WEBP", lossless=True)
    at = small.index(b"VP8L") + 9
    bits = int.from_bytes(small[at : at + 4], "little") & ~((1 << 28) - 1)
    bits |= (width - 1) | (height - 1) << 14
    return small[:at] + bits.to_bytes(4, "little") + small[at + 4 :]


def tiff_bomb(width: int = 100_000, height: int = 100_000) -> bytes:
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1),
               (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height)]  # fmt: skip
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


def jpeg_bomb(width: int = 65_500, height: int = 65_500) -> bytes:
    small = flat(8, 8, mode="L", kind="JPEG")
    at = small.index(b"\xff\xc0") + 5
    return small[:at] + struct.pack(">HH", height, width) + small[at + 4 :]


def with_size(image: bytes, width: int, height: int) -> bytes:
    """Change every size in the boxes of an AVIF or HEIC file, and no pixel."""
    size = struct.pack(">II", width, height)
    return re.sub(rb"(?s)(ispe....)........", lambda found: found[1] + size, image)


def avif_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    return with_size(flat(64, 64, mode="RGB", kind="AVIF"), width, height)


def heic_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    return with_size(heic_of_tiles(), width, height)


def heic_of_tiles() -> bytes:
    """A small photo of tiles, as phones write them."""
    return encoded(Image.new("RGB", (300, 200), (200, 10, 10)), "HEIF", tile_size=128)


BOMBS = {
    "png": png_bomb,
    "gif": gif_bomb,
    "bmp": bmp_bomb,
    "webp": webp_bomb,
    "tiff": tiff_bomb,
    "jpeg": jpeg_bomb,
    "avif": avif_bomb,
    "heic": heic_bomb,
}


# Slow ones: their pixels are few enough, and decoding them takes very long.


def jpeg_of_many_scans(size: int, *, total: int) -> bytes:
    """Progressive, and its last scan comes again and again."""
    image = encoded(Image.new("L", (size, size), 128), "JPEG", progressive=True)
    last = image[image.rindex(b"\xff\xda") : -2]
    return image[:-2] + last * ((total - len(image)) // len(last)) + image[-2:]


def gif_of_comments(*, total: int) -> bytes:
    """One comment before the picture, a byte at a time."""
    image = flat(8, 8, kind="GIF")
    at = image.index(b"\x2c", 13 + 3 * (2 << (image[10] & 7)))
    return image[:at] + b"\x21\xfe" + b"\x01a" * (total // 2) + b"\0" + image[at:]


def bmp_of_runs(size: int, *, total: int) -> bytes:
    """Run lengths of one pixel."""
    return _bmp(size, size, runs=b"\x01\x00" * (total // 2))


def png_of_chunks(*, total: int) -> bytes:
    """Chunks that say nothing, before the picture."""
    image = flat(8, 8)
    return image[:33] + _chunk(b"teSt") * (total // 12) + image[33:]


def gzip_bomb(size: int) -> bytes:
    """Zeros, a thousand to one."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as stream:
        for _ in range(size >> 20):
            stream.write(bytes(1 << 20))
    return buffer.getvalue()


def _chunk(kind: bytes, data: bytes = b"") -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def _bmp(width: int, height: int, *, runs: bytes) -> bytes:
    offset = 14 + 40 + 1024
    head = b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset)
    about = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return head + about + bytes(1024) + runs
