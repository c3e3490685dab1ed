"""What left-out images say: curves, forecasts, label errors and confusions, computed plainly."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.advice.advise import confusions, doubt_labels, gain, how_many_more, slopes
from trainer.advice.left_out import SHARES, LeftOut, leave_out

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]
WIDTH = 12


def drawn(classes: int, images: int, *, apart: float = 4.0) -> tuple[Doubles, Labels]:
    """Tokens of round classes, so many images of each."""
    draw = np.random.default_rng(3)
    means_CW = draw.normal(size=(classes, WIDTH)) * apart / np.sqrt(WIDTH)
    labels_N = np.repeat(np.arange(classes), images)
    return means_CW[labels_N] + draw.normal(size=(len(labels_N), WIDTH)), labels_N


def studied(tokens_NW: Doubles, labels_N: Labels) -> LeftOut:
    found = leave_out(tokens_NW, labels_N, may_judge_N=np.ones(len(labels_N), dtype=bool))
    assert found is not None
    return found


def test_with_all_images_the_curve_ends_at_the_errors_of_the_answers() -> None:
    tokens_NW, labels_N = drawn(5, 40, apart=2.5)
    found = studied(tokens_NW, labels_N)
    wrong_N = found.logits_NC.argmax(axis=1) != labels_N
    plain = [wrong_N[labels_N == place].mean() for place in range(5)]
    np.testing.assert_allclose(found.errors_CS[:, -1], plain)
    assert max(plain) > 0.05, "classes that are told apart without errors prove nothing"
    np.testing.assert_allclose(found.sizes_CS, np.tile(np.multiply(SHARES, 32), (5, 1)))


def test_fewer_images_have_more_errors() -> None:
    found = studied(*drawn(5, 40, apart=2.5))
    quarter, half, every = found.errors_CS.mean(axis=0)
    assert quarter > half > every


def test_copies_of_an_image_are_never_seen_while_one_is_left_out() -> None:
    """Two classes without any difference: whoever saw a copy would know its label."""
    draw = np.random.default_rng(0)
    tokens_NW = np.repeat(draw.normal(size=(60, WIDTH)), 4, axis=0)
    labels_N = np.repeat(np.arange(60) % 2, 4)
    right = (studied(tokens_NW, labels_N).logits_NC.argmax(axis=1) == labels_N).mean()
    assert 0.25 < right < 0.75


def test_a_class_with_few_images_is_learnt_from_and_not_judged() -> None:
    tokens_NW, labels_N = drawn(3, 20)
    stays_N = (labels_N != 2) | (np.arange(60) < 47)
    found = studied(tokens_NW[stays_N], labels_N[stays_N])
    assert np.isnan(found.errors_CS[2]).all()
    assert not found.judged_N[labels_N[stays_N] == 2].any()
    assert found.judged_N[labels_N[stays_N] < 2].all()


@pytest.mark.parametrize("tokens_NW", [np.ones((40, WIDTH)), drawn(2, 20)[0]])
def test_nothing_is_said_of_one_class_or_of_images_that_are_all_the_same(
    tokens_NW: Doubles,
) -> None:
    same = (tokens_NW == tokens_NW[0]).all()
    labels_N = np.arange(40) % 2 if same else np.zeros(40, dtype=np.int64)
    assert leave_out(tokens_NW, labels_N, may_judge_N=np.ones(40, dtype=bool)) is None


def test_a_curve_of_the_assumed_form_is_forecast_exactly() -> None:
    sizes_CS = np.array([[8.0, 16.0, 32.0], [10.0, 20.0, 40.0], [8.0, 16.0, 32.0]])
    errors_CS = np.array([[0.1], [0.02], [0.3]]) + np.array([[1.2], [0.4], [-1.0]]) / sizes_CS**0.75
    slope_C = slopes(sizes_CS, errors_CS)
    np.testing.assert_allclose(slope_C, [1.2, 0.4, 0.0], atol=1e-12)
    plain = (0.1 + 1.2 / 40**0.75) - (0.1 + 1.2 / 60**0.75)
    assert gain(slope_C[0], error=0.13, images=40, more=20) == pytest.approx(plain)


def test_no_forecast_takes_away_more_errors_than_there_are() -> None:
    assert gain(9.0, error=0.02, images=10, more=10) == 0.02


@pytest.mark.parametrize(
    ("images", "more"), [([4, 4], 5), ([30, 30, 30], 15), ([41, 39], 20), ([900], 50)]
)
def test_the_forecast_is_for_half_of_what_a_class_has(images: list[int], more: int) -> None:
    assert how_many_more(images) == more


def test_wrong_labels_come_first_and_are_told_with_the_class_that_they_look_like() -> None:
    tokens_NW, truth_N = drawn(4, 50, apart=6.0)
    labels_N, wrong = truth_N.copy(), np.arange(0, 200, 20)
    labels_N[wrong] = (truth_N[wrong] + 1) % 4
    doubted = doubt_labels(studied(tokens_NW, labels_N), labels_N)
    assert set(doubted.rows_M[:10]) == set(wrong)
    assert doubted.suspected_M[:10].all()
    assert (doubted.answers_M[:10] == truth_N[doubted.rows_M[:10]]).all()
    assert sorted(doubted.rows_M) == list(range(200)), "the list has every image once"


def test_an_answer_below_the_average_of_its_class_is_no_suspicion() -> None:
    """The threshold of confident learning, worked out by hand."""
    logits_NC = np.log(np.array([[0.9, 0.1], [0.7, 0.3], [0.1, 0.9], [0.45, 0.55], [0.05, 0.95]]))
    labels_N = np.array([0, 0, 1, 0, 0])
    nothing = np.zeros((2, 3))
    left_out = LeftOut(
        logits_NC=logits_NC,
        judged_N=np.ones(5, dtype=bool),
        sizes_CS=nothing,
        errors_CS=nothing,
    )
    doubted = doubt_labels(left_out, labels_N)
    # Class 1 has 0.9 on average of its own images: 0.95 reaches that, and 0.55 does not.
    assert doubted.rows_M.tolist() == [4, 3, 1, 0, 2]
    assert doubted.suspected_M.tolist() == [True, False, False, False, False]
    assert doubted.score_M == pytest.approx([0.05, 0.45, 0.7, 0.9, 0.9])


def test_confusions_name_the_surest_mistakes_first() -> None:
    logits_NC = np.array([[0.0, 1, 0], [0, 3, 0], [0, 2, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    left_out = LeftOut(
        logits_NC=logits_NC,
        judged_N=np.ones(6, dtype=bool),
        sizes_CS=np.zeros((3, 3)),
        errors_CS=np.zeros((3, 3)),
    )
    (pair,) = confusions(left_out, np.array([0, 0, 0, 0, 0, 2]))
    assert (pair.label, pair.taken_for, pair.rows.tolist()) == (0, 1, [1, 2, 0])
