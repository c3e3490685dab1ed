"""The advice as a whole: images by name, copies, and what cannot be said."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.report.advice import MAX_NAME, Advice, lines
from trainer.advice.advise import ALL_ALIKE, ONE_CLASS, AtHand, advise
from trainer.data.folders import LabelledImages

Floats = NDArray[np.float32]
WIDTH = 12
ITEM = "20250102t030405006-0123456789ab"


def images_of(counts: Sequence[int], *, names: Sequence[str] | None = None) -> LabelledImages:
    """Pictures with large patches of their own, which hashes tell apart."""
    total = sum(counts)
    patches = np.random.default_rng(total).integers(0, 255, (total, 9, 9, 3), dtype=np.uint8)
    return LabelledImages(
        classes=tuple("abcdefgh"[: len(counts)]),
        pixels_NHWC=patches.repeat(4, axis=1).repeat(4, axis=2),
        labels_N=np.repeat(np.arange(len(counts)), counts).astype(np.int64),
        names=names or [f"{number}.png" for number in range(total)],
    )


def tokens_of(images: LabelledImages, *, apart: float = 6.0) -> Floats:
    draw = np.random.default_rng(len(images))
    means_CW = np.random.default_rng(9).normal(size=(8, WIDTH)) * apart / np.sqrt(WIDTH)
    noise_NW = draw.normal(size=(len(images), WIDTH))
    return np.asarray(means_CW[images.labels_N] + noise_NW, dtype=np.float32)


def advised(
    learnt: LabelledImages,
    *,
    learnt_NW: Floats | None = None,
    judged: LabelledImages | None = None,
    judged_NW: Floats | None = None,
    lost: tuple[Floats, NDArray[np.int64]] | None = None,
) -> Advice:
    learnt_NW = tokens_of(learnt) if learnt_NW is None else learnt_NW
    judged = learnt.take(np.zeros(0, dtype=np.int64)) if judged is None else judged
    judged_NW = tokens_of(judged) if judged_NW is None else judged_NW
    lost_NW, lost_N = lost or (np.zeros((0, WIDTH), np.float32), np.zeros(0, np.int64))
    return advise(
        AtHand(
            learnt=learnt,
            learnt_NW=learnt_NW,
            judged=judged,
            judged_NW=judged_NW,
            lost_NW=lost_NW,
            lost_N=lost_N,
            kept={learnt.classes[place]: 90 for place in np.unique(lost_N)},
        )
    )


def test_classes_are_listed_with_their_gain_the_largest_first() -> None:
    images = images_of([16, 16, 16])
    advice = advised(images, learnt_NW=tokens_of(images, apart=2.0))
    gains = [one.gain for one in advice.classes]
    assert all(gain is not None for gain in gains)
    assert gains == sorted(gains, key=lambda gain: -(gain or 0.0))
    assert {one.more for one in advice.classes} == {10}
    assert any("more images of" in line.text for line in lines(advice))


def test_a_wrong_label_is_named_by_its_file_and_an_item_of_the_inbox_by_its_id() -> None:
    names = [f"{number}.png" for number in range(60)]
    names[0], names[30] = f"00001/{ITEM}.jpg", "x" * 1000
    images = images_of([30, 30], names=names)
    tokens_NW = tokens_of(images)
    tokens_NW[[0, 30]] = tokens_NW[[31, 1]]
    first, second = sorted(advised(images, learnt_NW=tokens_NW).suspects[:2], key=str)
    assert {first.image.item, second.image.item} == {ITEM, None}
    assert {first.image.name, second.image.name} == {ITEM, "…" + "x" * (MAX_NAME - 1)}
    assert {first.likelier, second.likelier} == {"a", "b"}


def test_a_small_class_is_told_to_have_too_few_images() -> None:
    advice = advised(images_of([30, 30, 7]))
    (small,) = (one for one in advice.classes if one.class_name == "c")
    assert (small.gain, small.accuracy) == (None, None)
    assert small.why == "it has 7 different images at hand, and 8 are needed"
    assert lines(advice)[-1].text.startswith("Nothing can be said of 1 class. c:")


def test_a_class_that_lost_images_is_learnt_from_and_not_forecast() -> None:
    three = tokens_of(images_of([0, 0, 40]))
    images = images_of([30, 30, 0])
    advice = advised(images, lost=(three, np.full(40, 2)))
    (lost,) = (one for one in advice.classes if one.class_name == "c")
    assert lost.why == "the store no longer has all of its 90 images"


def test_one_class_and_copies_only_are_told_to_say_nothing() -> None:
    assert advised(images_of([30])).notes == (ONE_CLASS,)
    images = images_of([30, 30])
    same = tokens_of(images)[images.labels_N * 30]
    assert advised(images, learnt_NW=same).notes == (ALL_ALIKE,)
    assert advised(images_of([5, 6])).notes == (ALL_ALIKE,)


def test_a_copy_among_the_images_to_judge_by_is_named_with_its_original() -> None:
    learnt, judged = images_of([20, 20]), images_of([3, 3], names=[f"judge/{n}" for n in "abcdef"])
    learnt_NW, judged_NW = tokens_of(learnt), tokens_of(judged)
    pixels = judged.pixels_NHWC.copy()
    written = io.BytesIO()
    Image.fromarray(learnt.pixels_NHWC[7]).save(written, "JPEG", quality=75)
    pixels[4] = np.asarray(Image.open(written))
    judged_NW[4] = learnt_NW[7] + 0.01
    judged_NW[5] = learnt_NW[9]  # the tokens are alike, and the pictures are not
    judged = LabelledImages(
        classes=judged.classes, pixels_NHWC=pixels, labels_N=judged.labels_N, names=judged.names
    )
    advice = advised(learnt, learnt_NW=learnt_NW, judged=judged, judged_NW=judged_NW)
    (copy,) = advice.copies
    assert (copy.judged.name, copy.learnt.name, advice.copies_in_all) == ("judge/e", "7.png", 1)
    assert any("judge/e and 7.png" in line.text for line in lines(advice))
