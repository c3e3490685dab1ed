"""The score of unknown images, fitted to clusters whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from model_store.inference.doubt import Doubt, none_of_these
from trainer.evaluation.unknown import (
    auroc,
    discriminant_weight,
    fit_doubt,
    fit_gaussians,
    fit_log_odds,
    leave_out,
)

WIDTH = 16
CLASSES = 12


def clusters(
    classes: range, *, images: int, seed: int = 0, spread: float = 0.6
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens around a centre of each class, more spread along some channels than others."""
    centres = np.random.default_rng(7).normal(size=(100, WIDTH))
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(classes)), images)
    noise = draw.normal(size=(len(labels), WIDTH)) * np.linspace(0.3, 2.0, WIDTH) * spread
    tokens = centres[classes.start :][labels] + noise + 1.0
    return tokens.astype(np.float32), labels.astype(np.int64)


def fitted(tokens: np.ndarray, labels: np.ndarray, *, classes: int = CLASSES) -> Doubt:
    fit = fit_doubt(tokens, labels, classes=classes, answered=range(classes))
    assert fit is not None
    return Doubt.of(fit.tensors, places=range(classes))


def test_images_of_other_classes_are_told_and_the_probability_is_that_of_a_half() -> None:
    doubt = fitted(*clusters(range(CLASSES), images=20))
    known = doubt.log_odds(clusters(range(CLASSES), images=50, seed=1)[0]).astype(np.float64)
    unknown = doubt.log_odds(clusters(range(CLASSES, 60), images=20, seed=2)[0]).astype(np.float64)
    assert auroc(known, unknown) > 0.85
    for odds, of_none in ((known, 0.0), (unknown, 1.0)):
        scores = np.array([none_of_these(one) for one in odds])
        assert abs(scores.mean() - of_none) < 0.4
    sure = np.concatenate([known, unknown]) > 1.5
    weights = np.concatenate([np.full(len(known), 1 / len(known)), np.full(len(unknown), 1 / 960)])
    are_known = np.arange(len(sure)) < len(known)
    share = weights[sure & are_known].sum() / weights[sure].sum()
    assert share > 0.8  # they are said to be known with 82 % or more


def test_discriminant_and_distance_count_alike() -> None:
    """The score is the distance to the nearest mean, negative and halved, and the discriminant."""
    tokens, labels = clusters(range(CLASSES), images=20)
    left_out = leave_out(tokens.astype(np.float64), labels)
    assert left_out is not None
    weight = discriminant_weight(left_out)
    discriminant = left_out.discriminant_F[left_out.known_F]
    distance = (left_out.square_F - 2 * left_out.discriminant_F)[left_out.known_F]
    assert ((weight - 1) * discriminant).std() == pytest.approx((distance / 2).std())
    expected = (weight - 1) * discriminant - distance / 2
    np.testing.assert_allclose(left_out.score(weight)[left_out.known_F], expected)


def test_whitening_makes_the_covariance_within_classes_the_identity() -> None:
    tokens, labels = clusters(range(CLASSES), images=400)
    gaussians = fit_gaussians(tokens.astype(np.float64), labels)
    assert gaussians is not None
    away = gaussians.whitened(tokens.astype(np.float64)) - gaussians.means_YW[labels]
    np.testing.assert_allclose(np.cov(away.T), np.eye(WIDTH), atol=0.1)


def test_every_class_is_left_out_once_and_no_image_is_scored_by_itself() -> None:
    tokens, labels = clusters(range(7), images=6)
    left_out = leave_out(tokens.astype(np.float64), labels)
    assert left_out is not None
    assert len(left_out.known_F) == len(labels)  # each image is in one part
    assert 0 < (~left_out.known_F).sum() < len(labels)
    gaussians = fit_gaussians(tokens.astype(np.float64), labels)
    assert gaussians is not None
    discriminant, square = gaussians.signs(tokens.astype(np.float64))
    by_itself = float((square - 2 * discriminant).mean())
    distance = left_out.square_F - 2 * left_out.discriminant_F
    assert distance[left_out.known_F].mean() > 1.3 * by_itself


def test_the_log_odds_are_those_of_two_normal_distributions() -> None:
    """Means 1 and -1 with variance 1: the log-odds are twice the score."""
    draw = np.random.default_rng(0)
    score = np.concatenate([draw.normal(1, 1, 40_000), draw.normal(-1, 1, 4_000)])
    slope, intercept = fit_log_odds(score, np.arange(len(score)) < 40_000)
    assert slope == pytest.approx(2.0, abs=0.15)
    assert intercept == pytest.approx(0.0, abs=0.1)


def test_a_score_that_parts_all_images_has_a_finite_slope() -> None:
    slope, _ = fit_log_odds(np.array([-2.0, -1.0, 1.0, 2.0]), np.array([False, False, True, True]))
    assert 0 < slope < 10


def test_retired_classes_have_rows_and_make_no_image_known() -> None:
    tokens, labels = clusters(range(6), images=10)
    answered = [0, 2, 3, 5, 6]
    places = np.array([0, 2, 3, 5, 6, 4])[labels]
    kept = places != 4
    fit = fit_doubt(tokens[kept], places[kept], classes=7, answered=answered)
    assert fit is not None
    tensors = fit.tensors
    assert tensors["doubt.prototypes"].shape == (7, WIDTH)
    assert not tensors["doubt.prototypes"][[1, 4]].any()
    doubt = Doubt.of(tensors, places=answered)
    odds = doubt.log_odds(tokens)
    assert odds[kept].mean() > odds[~kept].mean() + 1
    # The class is retired after the fit: its images are unknown from then on.
    fewer = Doubt.of(tensors, places=[2, 3, 5, 6]).log_odds(tokens[places == 0])
    assert (fewer < doubt.log_odds(tokens[places == 0])).all()


def test_a_class_with_an_only_image_is_known_too() -> None:
    tokens, labels = clusters(range(CLASSES), images=10)
    chosen = (labels != 3) | (np.arange(len(labels)) == np.flatnonzero(labels == 3)[0])
    doubt = fitted(tokens[chosen], labels[chosen])
    assert doubt.log_odds(tokens[chosen & (labels == 3)])[0] > 0


@pytest.mark.parametrize(
    ("classes", "images"), [(range(3), 10), (range(CLASSES), 1)], ids=["classes", "images"]
)
def test_too_few_to_leave_some_out_give_no_score(classes: range, images: int) -> None:
    tokens, labels = clusters(classes, images=images)
    assert fit_doubt(tokens, labels, classes=len(classes), answered=range(len(classes))) is None


def test_a_class_without_images_gives_no_score() -> None:
    tokens, labels = clusters(range(6), images=10)
    assert fit_doubt(tokens, labels, classes=7, answered=range(7)) is None


def test_images_that_are_all_the_same_give_no_score() -> None:
    _, labels = clusters(range(6), images=10)
    tokens = np.ones((len(labels), WIDTH), dtype=np.float32)
    assert fit_doubt(tokens, labels, classes=6, answered=range(6)) is None


def test_tokens_that_tell_nothing_of_classes_give_finite_tensors_or_none() -> None:
    tokens, labels = clusters(range(6), images=10)
    mixed = np.random.default_rng(0).permutation(labels)
    fit = fit_doubt(tokens, mixed, classes=6, answered=range(6))
    assert fit is None or all(np.isfinite(one).all() for one in fit.tensors.values())


def test_left_out_images_score_as_new_ones_do_and_twins_do_not_hide_it() -> None:
    tokens, labels = clusters(range(CLASSES), images=12)
    twins = np.repeat(np.arange(len(labels)), 3)
    draw = np.random.default_rng(3)
    seen = tokens[twins] + draw.normal(size=(len(twins), WIDTH)).astype(np.float32) * 0.02
    fit = fit_doubt(seen, labels[twins], classes=CLASSES, answered=range(CLASSES), groups_N=twins)
    alone = fit_doubt(
        seen, labels[twins], classes=CLASSES, answered=range(CLASSES), groups_N=np.arange(len(seen))
    )
    assert fit is not None
    assert alone is not None
    doubt = Doubt.of(fit.tensors, places=range(CLASSES))
    new = doubt.log_odds(clusters(range(CLASSES), images=60, seed=1)[0]).astype(np.float64)

    def refused(left_out_F: np.ndarray) -> float:
        return float((new < np.quantile(left_out_F, 0.05)).mean())

    assert len(fit.left_out_F) == len(seen)
    assert refused(fit.left_out_F) < 0.08
    assert refused(alone.left_out_F) > 2 * refused(fit.left_out_F)


def test_stand_ins_and_the_only_group_of_a_class_are_never_left_out() -> None:
    tokens, labels = clusters(range(6), images=10)
    groups = np.arange(len(labels))
    groups[labels == 0], groups[labels == 1] = 0, -1
    fit = fit_doubt(tokens, labels, classes=6, answered=range(6), groups_N=groups)
    assert fit is not None
    assert len(fit.left_out_F) == 40
