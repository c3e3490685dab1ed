from __future__ import annotations

import numpy as np
import pytest

from model_store.preprocess import encode_png
from model_store.records.manifest import Preprocessing
from trainer.data.pictures import Pictures, Pixels, StoredImage

SIDE = 8
PREPROCESSING = Preprocessing(image_size=SIDE)


def drawn(count: int, *, seed: int) -> Pixels:
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(count, SIDE, SIDE, 3), dtype=np.uint8)


def stored(pixels_NHWC: Pixels) -> Pictures:
    images = [StoredImage(encode_png(one), PREPROCESSING) for one in pixels_NHWC]
    return Pictures(images, side=SIDE)


def test_files_and_pixels_side_by_side_give_the_pixels_of_both_in_order() -> None:
    new, old = drawn(3, seed=0), drawn(2, seed=1)
    both = Pictures.of(new).joined([stored(old)])
    assert len(both) == 5
    np.testing.assert_array_equal(both.pixels_NHWC, np.concatenate([new, old]))
    rows = np.array([4, 0])
    np.testing.assert_array_equal(both.take(rows).pixels_NHWC, np.stack([old[1], new[0]]))


def test_an_image_keeps_its_digest_whether_it_was_decoded_or_not() -> None:
    pictures = stored(drawn(3, seed=2))
    before = pictures.digests()
    assert len(set(before)) == 3
    assert pictures.pixels_NHWC.shape == (3, SIDE, SIDE, 3)
    assert pictures.digests() == before
    assert pictures.take(np.array([2])).digests() == before[2:]


def test_a_file_and_its_pixels_have_digests_of_their_own() -> None:
    pixels = drawn(1, seed=3)
    assert stored(pixels).digests() != Pictures.of(pixels).digests()


def test_a_file_of_the_store_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = drawn(1, seed=4)
    file, encoded = encode_png(pixels[0]), Pictures.of(pixels).encoded(0)
    assert encoded == file
    kept = stored(pixels)
    monkeypatch.setattr("trainer.data.pictures.encode_png", lambda _: b"another")
    assert kept.encoded(0) == file


def test_no_images_have_the_shape_of_images() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert stored(drawn(2, seed=5)).take(nothing).pixels_NHWC.shape == (0, SIDE, SIDE, 3)
    assert Pictures([], side=SIDE).joined([Pictures([], side=SIDE)]).pixels_NHWC.shape[0] == 0
