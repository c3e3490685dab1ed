from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from dne_serve.inference.decode_process import DecodeProcess
from dne_serve.inference.decode_worker import Reencoded, reencode
from dne_serve.loop.writer import NEAR_BITS, WaitingHashes
from model_store.errors import ImageRejected, ImageTooLarge
from model_store.preprocess import dhash
from tests.dne_serve.loop.photos import PLACE, encoded, photo, with_metadata

MANY = 40_000_000


def opened(kept: Reencoded) -> Image.Image:
    return Image.open(io.BytesIO(kept.data))


@pytest.mark.parametrize(("width", "height"), [(1200, 600), (100, 100), (512, 300)])
def test_pictures_are_at_most_512_pixels_long(width: int, height: int) -> None:
    kept = reencode(encoded(photo(1, width=width, height=height)), max_pixels=MANY)
    scale = min(1, 512 / max(width, height))
    assert (kept.width, kept.height) == (round(width * scale), round(height * scale))
    assert opened(kept).size == (kept.width, kept.height)
    assert kept.type == ("image/png" if width * height < 128 * 128 else "image/jpeg")


@pytest.mark.parametrize("size", [64, 600])
def test_nothing_but_pixels_is_kept(size: int) -> None:
    kept = reencode(with_metadata(photo(1, width=size, height=size)), max_pixels=MANY)
    assert PLACE.encode() not in kept.data
    assert b"Exif" not in kept.data
    found = opened(kept)
    found.load()
    assert not found.getexif()
    assert not {"comment", "icc_profile", "exif", "xmp"} & found.info.keys()


def test_a_picture_is_kept_upright() -> None:
    flat = photo(3, width=60, height=30)
    kept = reencode(with_metadata(flat, orientation=6), max_pixels=MANY)
    assert (kept.width, kept.height) == (30, 60)
    turned = np.asarray(flat.rotate(-90, expand=True), dtype=int)
    assert np.abs(np.asarray(opened(kept), dtype=int) - turned).mean() < 8


def test_small_pictures_are_kept_without_loss() -> None:
    picture = photo(2, width=32, height=32)
    kept = reencode(encoded(picture, "PNG"), max_pixels=MANY)
    assert np.array_equal(np.asarray(opened(kept)), np.asarray(picture))


def test_bad_pictures_are_refused() -> None:
    with pytest.raises(ImageRejected):
        reencode(b"no picture", max_pixels=MANY)
    with pytest.raises(ImageTooLarge):
        reencode(encoded(photo(1)), max_pixels=10)


def test_a_process_of_its_own_gives_the_same() -> None:
    process = DecodeProcess(seconds=30, max_pixels=MANY, niceness=1)
    data = with_metadata(photo(5, width=700, height=500))
    try:
        assert process.reencode(data) == reencode(data, max_pixels=MANY)
        with pytest.raises(ImageRejected):
            process.reencode(b"no picture")
    finally:
        process.stop()


def test_copies_are_near_and_others_are_not() -> None:
    picture = photo(1, width=300, height=200)
    waiting = WaitingHashes([dhash(photo(seed, width=300, height=200)) for seed in range(100, 300)])
    assert not waiting.has_near(dhash(picture))
    waiting.add(dhash(picture))
    copies = [
        picture.resize((150, 100)),
        Image.open(io.BytesIO(encoded(picture, quality=40))),
        ImageEnhance.Brightness(picture).enhance(1.1),
    ]
    for copy in copies:
        assert waiting.has_near(dhash(copy))


def test_the_threshold_is_the_number_of_bits() -> None:
    waiting = WaitingHashes()
    assert not waiting.has_near(0)
    for _ in range(100):
        waiting.add(0)
    assert waiting.has_near((1 << NEAR_BITS) - 1)
    assert not waiting.has_near((1 << (NEAR_BITS + 1)) - 1)
