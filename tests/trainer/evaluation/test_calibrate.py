from __future__ import annotations

import numpy as np
import pytest

from trainer.evaluation.judged import Judged, calibrate, fit_temperature

CLASSES = tuple("abcd")


def drawn(count: int, *, sharpness: float, seed: int = 0) -> Judged:
    """Labels drawn from the softmax of logits that are then made `sharpness` times too sharp."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(count, 4)) * 2
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([draw.choice(4, p=row) for row in chances], dtype=np.int64)
    return Judged(
        classes=CLASSES, labels_N=labels, logits_NC=(logits * sharpness).astype(np.float32)
    )


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_the_temperature_undoes_what_made_logits_too_sharp_or_too_flat(sharpness: float) -> None:
    assert fit_temperature(drawn(4000, sharpness=sharpness)) == pytest.approx(sharpness, rel=0.1)


def test_the_error_falls_on_images_that_the_temperature_was_not_fitted_on() -> None:
    calibration = calibrate(drawn(2000, sharpness=3.0), older="ab", newest="cd")
    assert calibration.images == 2000
    for name in ("all", "old", "new"):
        before, after = getattr(calibration.before, name), getattr(calibration.after, name)
        assert before > 0.15
        assert after < 0.05


def test_each_image_is_judged_by_a_temperature_of_the_other_folds() -> None:
    judged = drawn(10, sharpness=3.0)
    on_the_same = judged.calibration_error(temperature=fit_temperature(judged))
    assert calibrate(judged, older="ab", newest="cd").after.all != pytest.approx(on_the_same)


def test_a_few_right_answers_do_not_make_a_version_certain() -> None:
    sure = Judged(
        classes=CLASSES,
        labels_N=np.arange(4),
        logits_NC=np.eye(4, dtype=np.float32) * 2,
    )
    assert 0.3 < fit_temperature(sure) < 1


def test_with_nothing_to_fit_on_the_temperature_is_1() -> None:
    nothing = Judged(
        classes=CLASSES,
        labels_N=np.zeros(0, dtype=np.int64),
        logits_NC=np.zeros((0, 4), dtype=np.float32),
    )
    calibration = calibrate(nothing, older="ab", newest="cd")
    assert (calibration.temperature, calibration.images) == (1.0, 0)
    assert calibration.before.all is None


def test_classes_that_no_image_is_of_have_no_error() -> None:
    calibration = calibrate(drawn(50, sharpness=1.0), older=[], newest=CLASSES)
    assert calibration.after.old is None
    assert calibration.after.new == pytest.approx(calibration.after.all)


@pytest.mark.long
def test_what_was_fitted_on_many_images_is_not_undone_by_a_few() -> None:
    """100 images in which sharpness happens to look like 1.5, after 900 have said that it is 1."""
    few = drawn(100, sharpness=1.5)
    alone = calibrate(few, older="ab", newest="cd").temperature
    after_many = calibrate(few, older="ab", newest="cd", fitted_on=900).temperature
    assert alone > 1.3
    assert 1 < after_many < 1 + (alone - 1) / 2
    assert calibrate(few, older="ab", newest="cd", fitted_on=20).temperature == alone
    many = drawn(20_000, sharpness=1.5)
    assert calibrate(many, older="ab", newest="cd", fitted_on=900).temperature > 1.4


def test_images_that_belong_together_tell_as_much_as_one() -> None:
    """40 images in 10 groups of four copies have the temperature of the ten images."""
    ten = drawn(10, sharpness=3.0)
    copies = ten.take(np.repeat(np.arange(10), 4))
    fitted = calibrate(copies, older="ab", newest="cd", together=4).temperature
    assert fitted == pytest.approx(calibrate(ten, older="ab", newest="cd").temperature, rel=0.02)
    assert calibrate(copies, older="ab", newest="cd").temperature > 1.05 * fitted
