"""The gate allows old classes the fall that more classes cost, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.evaluation.gate import GateInput, decide
from trainer.evaluation.judged import Judged
from trainer.evaluation.price import NO_PRICE, Price, price_of
from trainer.request import GateLimits

OLD, NEW = ("a", "b"), ("c", "d")


def answered(
    labels: list[int], answers: list[int], *, among_old: list[int] | None = None
) -> Judged:
    """Judge images whose second choice, among the old classes, is that of `among_old`."""
    logits = np.zeros((len(labels), 4), dtype=np.float32)
    rows = np.arange(len(labels))
    logits[rows, labels if among_old is None else among_old] = 2
    logits[rows, answers] = 4
    return Judged(classes=(*OLD, *NEW), labels_N=np.array(labels, dtype=np.int64), logits_NC=logits)


def fell(count: int, *, price: Price, of: int = 100) -> bool:
    """Return whether a version is refused that answers `count` of `of` old images with class c."""
    labels = [0, 1] * (of // 2)
    before = answered(labels, labels)
    before.logits_NC[:, 2:] = -np.inf
    after = answered(labels, [2] * count + labels[count:])
    candidate = GateInput(
        judged=after, parent=before, older=OLD, newest=NEW, model_bytes=1, price=price
    )
    return not decide(candidate, limits=GateLimits()).passed


def test_a_fall_within_the_price_passes() -> None:
    assert fell(9, price=NO_PRICE)
    assert not fell(9, price=Price(taken=36, images=400))


def test_a_fall_beyond_the_price_is_refused() -> None:
    assert fell(20, price=Price(taken=36, images=400))


def test_damage_among_old_classes_is_refused_at_any_price() -> None:
    labels = [0, 1] * 50
    before = answered(labels, labels)
    before.logits_NC[:, 2:] = -np.inf
    after = answered(labels, [1 - label for label in labels[:15]] + labels[15:])
    candidate = GateInput(
        judged=after,
        parent=before,
        older=OLD,
        newest=NEW,
        model_bytes=1,
        price=Price(taken=100, images=400),
    )
    assert not decide(candidate, limits=GateLimits()).passed


def test_images_that_belong_together_count_once() -> None:
    price = Price(taken=8, images=80).each_counting(0.25)
    assert price == Price(taken=2, images=20)
    assert price.chance_of(4, of=20) > Price(taken=8, images=80).chance_of(16, of=80)


def test_the_price_is_what_new_classes_take_of_left_out_images() -> None:
    labels = [0] * 50 + [1] * 50 + [2] * 40 + [3] * 40
    answers = [2] * 4 + [0] * 46 + [1] * 50 + [0] * 5 + [2] * 35 + [3] * 40
    assert price_of(answered(labels, answers), newest=NEW) == Price(taken=4, images=100)


def test_an_image_that_was_wrong_anyway_has_no_price() -> None:
    labels = [0] * 50 + [1] * 50 + [2] * 40
    answers = [2] * 4 + [0] * 46 + [1] * 50 + [2] * 40
    lost = [1] * 4 + labels[4:]
    assert price_of(answered(labels, answers, among_old=lost), newest=NEW).taken == 0


def test_a_twin_of_an_old_class_has_no_price() -> None:
    """Class c has the pictures of class a, so half of both are taken for the other."""
    labels = [0] * 40 + [1] * 40 + [2] * 40
    answers = [2] * 20 + [0] * 20 + [1] * 40 + [0] * 20 + [2] * 20
    assert price_of(answered(labels, answers), newest=NEW) == Price(taken=0, images=80)


def test_too_few_left_out_images_tell_no_price() -> None:
    assert price_of(answered([0] * 5 + [2] * 40, [2] * 45), newest=NEW) is NO_PRICE
    assert price_of(None, newest=NEW) is NO_PRICE


@pytest.mark.parametrize(("taken", "of"), [(0, 10), (3, 12), (12, 12)])
def test_the_chance_is_that_of_fishers_exact_test(taken: int, of: int) -> None:
    """By drawing: which of all images that were taken are among those of the version?"""
    price = Price(taken=5, images=40)
    draw = np.random.default_rng(0)
    marked = np.arange(40 + of) < 5 + taken
    drawn = [draw.permutation(marked)[:of].sum() >= taken for _ in range(4000)]
    assert price.chance_of(taken, of=of) == pytest.approx(np.mean(drawn), abs=0.03)
