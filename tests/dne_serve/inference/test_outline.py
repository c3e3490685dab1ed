from __future__ import annotations

import io
import struct
import time
import warnings
from collections.abc import Callable

import pytest
from PIL import Image

from dne_serve.inference.decoding import is_cheap
from dne_serve.inference.image_outline import is_cheap_exif, read_outline
from tests.abuse import structures as made
from tests.abuse.images import (
    BOMBS,
    encoded,
    flat,
    gif_of_comments,
    heic_of_tiles,
    png_of_chunks,
    with_size,
)
from tests.abuse.structures import jpeg_segment, png_chunk

PHOTO = Image.radial_gradient("L").resize((90, 70)).convert("RGB")
USUAL: dict[str, tuple[str, str, dict[str, object]]] = {
    "jpeg": ("RGB", "JPEG", {}),
    "grey jpeg": ("L", "JPEG", {}),
    "cmyk jpeg": ("CMYK", "JPEG", {}),
    "progressive jpeg": ("RGB", "JPEG", {"progressive": True, "quality": 95}),
    "jpeg with a profile": ("RGB", "JPEG", {"icc_profile": bytes(150_000), "comment": b"hello"}),
    "jpeg with restarts": ("RGB", "JPEG", {"restart_marker_blocks": 1}),
    "png": ("RGB", "PNG", {}),
    "png with alpha": ("RGBA", "PNG", {}),
    "png with a palette": ("P", "PNG", {"transparency": 0}),
    "png with a profile": ("RGB", "PNG", {"icc_profile": bytes(3000), "dpi": (72, 72)}),
    "webp": ("RGB", "WEBP", {}),
    "webp with alpha": ("RGBA", "WEBP", {}),
    "webp without loss": ("RGB", "WEBP", {"lossless": True}),
    "gif": ("P", "GIF", {"comment": b"x" * 2000}),
    "gif that loops": ("P", "GIF", {"loop": 0, "comment": b"hello"}),
    "gif with transparency": ("P", "GIF", {"transparency": 0, "interlace": 1}),
    "bmp": ("RGB", "BMP", {}),
    "bmp with a palette": ("P", "BMP", {}),
}
ODD: dict[str, Callable[[], bytes]] = {
    "png with 200 profiles": lambda: made.png_of_profiles(200),
    "png with 9 compressed texts": lambda: made.png_of_texts(9),
    "png with 9 international texts": lambda: made.png_of_texts(9, kind=b"iTXt"),
    "png with 300 empty chunks": lambda: png_of_chunks(total=300 * 12),
    "png with 300 empty pixel chunks": lambda: made.png_of_empty_pixels(300),
    "png with two headers": lambda: made.png_with(
        png_chunk(b"IHDR", bytes([0, 0, 0, 8] * 2 + [8, 0, 0, 0, 0]))
    ),
    "png with EXIF in a text": lambda: made.png_with(
        png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 4\n00")
    ),
    "png with a tag that is all of a file": lambda: made.png_with_exif(
        made.exif_of_large_tags(400, size=250_000)
    ),
    "png with 30,000 rationals": lambda: made.png_with_exif(made.exif_of_nested(30_000)),
    "png with two EXIF chunks": lambda: made.png_with(
        png_chunk(b"eXIf", made.exif_of_nested(1)) * 2
    ),
    "animated png": lambda: made.animated("PNG", frames=3),
    "jpeg with 8,000 rationals": lambda: made.jpeg_with_exif(made.exif_of_nested(8000)),
    "jpeg with two EXIF segments": lambda: made.jpeg_with(
        jpeg_segment(0xE1, b"Exif\0\0" + made.exif_of_nested(1)) * 2
    ),
    "jpeg with 200 comments": lambda: made.jpeg_with(jpeg_segment(0xFE) * 200),
    "jpeg with padding": lambda: made.jpeg_with(b"\xff" * 1000),
    "jpeg with several pictures": lambda: made.jpeg_with(jpeg_segment(0xE2, b"MPF\0" + bytes(9))),
    "jpeg with arithmetic coding": lambda: made.jpeg_with(b"").replace(b"\xff\xc0", b"\xff\xc9"),
    "gif with a comment in blocks of a byte": lambda: gif_of_comments(total=3000),
    "gif with junk": lambda: made.gif_with(bytes(9)),
    "animated webp": lambda: made.animated("WEBP", frames=3),
    "bmp of runs": lambda: made.bmp_of_runs(100, 100, runs=b"\1\0" * 9),
    "avif": lambda: flat(64, 48, mode="RGB", kind="AVIF"),
    "avif with alpha": lambda: flat(64, 48, mode="RGBA", kind="AVIF"),
    "animated avif": lambda: made.animated("AVIF", frames=3),
    "heic": lambda: flat(64, 64, mode="RGB", kind="HEIF"),
    "heic of tiles": heic_of_tiles,
    "tiff": lambda: flat(8, 8, mode="L", kind="TIFF"),
    "tiff of strips": lambda: made.tiff_of_strips(2000),
    "tiff of tiles": lambda: made.tiff_of_tiles(20),
}


def opened_size(data: bytes) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            return image.size


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_image_is_cheap_and_its_size_is_known(name: str) -> None:
    mode, kind, options = USUAL[name]
    data = encoded(PHOTO.convert(mode), kind, **options)
    outline = read_outline(data)
    assert (outline.width, outline.height) == (90, 70) == opened_size(data)
    assert is_cheap(outline, size_bytes=len(data))


@pytest.mark.parametrize("name", ODD)
def test_an_odd_structure_is_not_cheap_and_its_size_is_known(name: str) -> None:
    data = ODD[name]()
    outline = read_outline(data)
    assert not outline.is_plain
    if outline.pixels:
        assert (outline.width, outline.height) == opened_size(data)


@pytest.mark.parametrize("block", [b"\x21\x01\0", b"\x21\xff\x0bNETSCAPE2.0\0"])
def test_a_gif_whose_extension_ends_too_early_for_pillow_is_odd(block: bytes) -> None:
    """Pillow reads past its end, and sees other blocks than those that were counted."""
    assert not read_outline(made.gif_with(block)).is_plain


def test_a_lossless_webp_costs_more_than_its_pixels() -> None:
    """It may have Huffman codes of its own for every block of 16 pixels."""
    data = made.webp_of_groups(1000, groups=9000)
    assert opened_size(data) == (1000, 1000)
    assert not is_cheap(read_outline(data), size_bytes=len(data))


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_boxes_of_any_form_are_walked_to_the_largest_size(kind: str) -> None:
    """A file of 64-bit lengths, with its pictures before their description."""
    image = with_size(flat(64, 64, mode="RGB", kind=kind), 70_000, 9)
    start = int.from_bytes(image[:4])
    long = struct.pack(">I4sQ", 1, b"free", 20) + bytes(4)
    moved = image[:start] + long + struct.pack(">I4s", 16, b"mdat") + bytes(8) + image[start:]
    outline = read_outline(moved)
    assert (outline.width, outline.height, outline.is_plain) == (70_000, 9, False)
    assert read_outline(struct.pack(">I", 1 << 20) + image[4:]).is_plain is False


@pytest.mark.parametrize("tail", [b"", bytes(100), b"\0\0\0\x08meta" * 5000, b"\0\0\0\1free" * 9])
def test_boxes_that_lead_nowhere_are_left_soon(tail: bytes) -> None:
    began = time.process_time()
    assert not read_outline(b"\0\0\0\x10ftypavif\0\0\0\0" + tail).is_plain
    assert time.process_time() - began < 0.05


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_size_of_a_tiff_is_read_in_both_byte_orders_and_in_the_big_form(order: str) -> None:
    mark = {"<": b"II", ">": b"MM"}[order]
    usual = struct.pack(f"{order}HIHHHIIHHIHxx", 42, 8, 2, 256, 4, 1, 70_000, 257, 3, 1, 9)
    outline = read_outline(mark + usual + bytes(4))
    assert (outline.width, outline.height) == (70_000, 9)
    big = struct.pack(f"{order}HHHQQHHQQHHQQ", 43, 8, 0, 16, 2, 256, 4, 1, 7, 257, 4, 1, 9)
    big = big.replace(struct.pack(f"{order}Q", 7), struct.pack(f"{order}I", 7) + bytes(4), 1)
    assert read_outline(mark + big).width == 7


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_tells_its_size(name: str) -> None:
    assert read_outline(BOMBS[name]()).pixels > 200_000_000


def test_any_beginning_of_a_file_has_an_outline() -> None:
    for data in (
        *(encoded(PHOTO.convert(mode), kind, **options) for mode, kind, options in USUAL.values()),
        *(make() for make in ODD.values()),
    ):
        for end in {*range(min(len(data), 120)), *range(120, len(data), 997)}:
            read_outline(data[:end])


def test_bytes_of_no_format_are_left_to_pillow_which_opens_none_of_them() -> None:
    for data in (b"", b"x", b"\x89PNG", b"RIFF\0\0\0\0WAVE", b"%PDF-1.7", bytes(100)):
        assert read_outline(data).pixels == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: png_of_chunks(total=4_000_000),
        lambda: made.png_of_empty_pixels(300_000),
        lambda: made.jpeg_with(jpeg_segment(0xFE) * 1_000_000),
        lambda: made.jpeg_with(b"\xff" * 4_000_000),
        lambda: gif_of_comments(total=4_000_000),
        lambda: made.png_with_exif(made.exif_of_large_tags(15_000, size=4_000_000)),
        lambda: made.tiff_of_tags(25_000),
        lambda: b"RIFF\xff\xff\xff\x7fWEBPVP8X" + bytes(4_000_000),
        lambda: b"\x89PNG\r\n\x1a\n\xff\xff\xff\xffIHDR" + bytes(4_000_000),
    ],
)
def test_reading_an_outline_is_little_work_for_any_file(make: Callable[[], bytes]) -> None:
    data = make()
    began = time.process_time()
    outline = read_outline(data)
    assert time.process_time() - began < 0.1
    assert not is_cheap(outline, size_bytes=len(data))


def test_exif_data_of_a_camera_is_cheap_and_directories_in_a_ring_are_not() -> None:
    camera = Image.Exif()
    camera[271], camera[274], camera[282] = "a maker", 6, 72.0
    camera[0x8769] = {0x829A: 0.01, 0x927C: bytes(30_000), 0x9003: "2026:11:16 21:00:00"}
    camera[0x8825] = {1: "N", 2: (52.0, 31.0, 12.5), 3: "E", 4: (13.0, 24.0, 18.0)}
    assert is_cheap_exif(camera.tobytes())
    ring = b"II*\0" + struct.pack("<I", 8) + made.directory([(0x8769, 4, 1, 8)])
    assert not is_cheap_exif(ring)
