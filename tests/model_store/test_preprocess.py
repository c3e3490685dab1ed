"""Every kind of image people have, and bytes that are none."""

from __future__ import annotations

import io
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model_store import preprocess
from model_store.errors import ImageRejected, ImageTooLarge
from model_store.preprocess import encode_png, fit_pixels, normalise, read_picture, read_pixels
from model_store.records.manifest import Preprocessing
from tests.abuse.images import flat, heic_of_tiles, with_size

SMALL = Preprocessing(image_size=8)
HOSTILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "hostile-images"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def test_pixels_survive_png_exactly() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(read_pixels(encode_png(pixels), SMALL), pixels)


@pytest.mark.parametrize("size", [(8, 8), (9, 31), (30, 8), (1, 1)])
def test_pixels_are_fitted_as_an_image_of_them_is(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    assert np.array_equal(fit_pixels(pixels, SMALL), read_pixels(encode_png(pixels), SMALL))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF"])
def test_every_accepted_format_opens(kind: str) -> None:
    data = encoded(Image.new("RGB", (20, 10), (200, 10, 10)), kind)
    pixels = read_pixels(data, SMALL)
    assert pixels.shape == (8, 8, 3)
    assert abs(pixels.astype(int) - [200, 10, 10]).max() < 12


def test_greyscale_becomes_three_equal_channels() -> None:
    pixels = read_pixels(encoded(Image.new("L", (8, 8), 77)), SMALL)
    assert (pixels == 77).all()


def test_palette_colours_are_looked_up() -> None:
    image = Image.new("RGB", (8, 8), (0, 255, 0)).convert("P")
    assert (read_pixels(encoded(image), SMALL) == [0, 255, 0]).all()


def test_transparent_pixels_lie_on_white() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (read_pixels(encoded(image), SMALL) == 255).all()


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    deep = Image.fromarray(np.full((8, 8), 32768, dtype=np.uint16))
    assert deep.mode == "I;16"
    assert (read_pixels(encoded(deep), SMALL) == 128).all()


def test_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (8, 8))
    image.paste((255, 255, 255), (0, 0, 8, 4))  # white on top
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn clockwise
    pixels = read_pixels(encoded(image, "PNG", exif=exif), SMALL)
    assert (pixels[:, 4:] == 255).all()
    assert (pixels[:, :4] == 0).all()


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_photos_of_phones_are_turned_by_their_boxes(kind: str) -> None:
    image = Image.new("RGB", (80, 40))
    image.paste((255, 255, 255), (0, 0, 80, 20))  # white on top
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = read_picture(encoded(image, kind, exif=exif.tobytes()), max_side=80)
    assert picture.size == (40, 80)
    pixels = np.asarray(picture)
    assert (pixels[40, 30] > 240).all()  # white to the right
    assert (pixels[40, 10] < 15).all()


def test_a_photo_of_tiles_and_the_first_of_several_pictures_are_read() -> None:
    assert abs(read_pixels(heic_of_tiles(), SMALL).astype(int) - [200, 10, 10]).max() < 12
    for kind in ("AVIF", "HEIF"):
        red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
        several = encoded(red, kind, save_all=True, append_images=[blue] * 3)
        assert (read_pixels(several, SMALL)[..., 0] > 240).all()


def test_heic_without_its_library_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    preprocess._register_heic.cache_clear()
    with pytest.raises(ImageRejected, match=r"pip install 'dne-serve\[heic\]'"):
        read_pixels(heic_of_tiles(), SMALL)
    monkeypatch.undo()
    assert read_pixels(heic_of_tiles(), SMALL).shape == (8, 8, 3)


def test_fifty_megapixels_are_within_the_limit() -> None:
    assert preprocess.MAX_PIXELS >= 8192 * 6144
    assert read_pixels(flat(8192, 6144, mode="1"), SMALL).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_a_phones_photo_that_lies_or_ends_early_is_refused(kind: str) -> None:
    image = flat(64, 64, mode="RGB", kind=kind)
    for broken in (image[: len(image) // 2], image[:-15], with_size(image, 0, 0)):
        with pytest.raises(ImageRejected):
            read_pixels(broken, SMALL)
    with pytest.raises(ImageTooLarge):
        read_pixels(with_size(image, 10_000, 10_000), SMALL)


def test_a_heic_with_more_pixels_than_it_says_is_not_decoded() -> None:
    large = with_size(flat(2048, 2048, mode="L", kind="HEIF"), 64, 64)
    with pytest.raises(ImageRejected, match="2048x2048 exceeds"):
        read_pixels(large, SMALL)


def test_the_middle_square_of_a_wide_image_is_kept() -> None:
    image = Image.new("RGB", (24, 8))
    image.paste((255, 255, 255), (8, 0, 16, 8))
    assert (read_pixels(encoded(image), SMALL) == 255).all()


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", b"\x00" * 1000])
def test_bytes_that_are_no_image_are_refused(data: bytes) -> None:
    with pytest.raises(ImageRejected):
        read_pixels(data, SMALL)


def test_a_truncated_image_is_refused() -> None:
    data = encoded(Image.effect_noise((64, 64), 50))
    with pytest.raises(ImageRejected, match="damaged"):
        read_pixels(data[: len(data) // 2], SMALL)


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body).to_bytes(4, "big")
        return len(body).to_bytes(4, "big") + kind + body + crc

    size = (9000).to_bytes(4, "big") * 2
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\x02\x00\x00\x00")
    with pytest.raises(ImageTooLarge, match="9000×9000"):
        read_pixels(bomb + chunk(b"IDAT", b""), SMALL)


def test_a_format_that_was_not_named_is_never_opened() -> None:
    with pytest.raises(ImageRejected, match="accepted format"):
        read_pixels(encoded(Image.new("RGB", (8, 8)), "PPM"), SMALL)


def test_normalised_pixels_have_the_networks_layout() -> None:
    preprocessing = Preprocessing(image_size=2, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    pixels = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    pixels[..., 0] = 255
    batch = normalise(pixels, preprocessing)
    assert batch.shape == (1, 3, 2, 2)
    assert batch.flags["C_CONTIGUOUS"]
    assert batch.dtype == np.float32
    assert np.allclose(batch[0, :, 0, 0], [1.0, -1.0, -0.5])


@pytest.mark.skipif(not HOSTILE.is_dir(), reason="SKIPPED: no folder of hostile images beside us")
def test_hostile_images_are_decoded_or_refused_and_nothing_else() -> None:
    outcomes = {"read": 0, "refused": 0}
    for path in sorted(p for p in HOSTILE.rglob("*") if p.is_file()):
        try:
            assert read_pixels(path.read_bytes(), SMALL).shape == (8, 8, 3), path
            outcomes["read"] += 1
        except ImageRejected:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes
