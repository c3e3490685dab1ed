"""Statistics are carried over to a changed expert as far as the images at hand can tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.embeddings.statistics import accumulate
from trainer.growth.carried import TokenMap, carry

WIDTH = 6
Doubles = NDArray[np.float64]


def tokens(count: int, *, seed: int, at: float = 0.0) -> Doubles:
    return np.asarray(np.random.default_rng(seed).normal(size=(count, WIDTH)) + at)


def test_a_linear_change_of_the_expert_is_found_again() -> None:
    draw = np.random.default_rng(3)
    matrix, moved = np.eye(WIDTH) + 0.3 * draw.normal(size=(WIDTH, WIDTH)), draw.normal(size=WIDTH)
    before = tokens(4000, seed=0)
    after = before @ matrix + moved
    gone = tokens(50, seed=1, at=1.0)
    (carried,) = carry(
        {"gone": accumulate(gone)},
        before_NW=before.astype(np.float32),
        after_NW=after.astype(np.float32),
        labels_N=np.ones(len(before), dtype=np.int64),
        classes=("gone", "here"),
    ).values()
    expected = accumulate(gone @ matrix + moved)
    assert carried.count == 50
    assert np.allclose(carried.mean_W, expected.mean_W, atol=0.2)
    missed = np.linalg.norm(carried.scatter_WW - expected.scatter_WW)
    assert missed < 0.15 * np.linalg.norm(expected.scatter_WW)


def test_without_a_change_statistics_stay() -> None:
    before = tokens(30, seed=0).astype(np.float32)
    old = accumulate(tokens(20, seed=1))
    (carried,) = carry(
        {"gone": old},
        before_NW=before,
        after_NW=before,
        labels_N=np.ones(30, dtype=np.int64),
        classes=("gone", "here"),
    ).values()
    assert np.allclose(carried.mean_W, old.mean_W, atol=1e-5)
    assert np.allclose(carried.scatter_WW, old.scatter_WW, atol=1e-4)


def test_few_images_do_not_turn_the_map_into_noise() -> None:
    before = tokens(3, seed=0)
    over = TokenMap.fit(before.astype(np.float32), (before + 1).astype(np.float32))
    assert np.allclose(over(tokens(5, seed=2)), tokens(5, seed=2) + 1, atol=1e-5)


def test_images_that_are_left_of_a_class_move_its_mean() -> None:
    before, own = tokens(200, seed=0), tokens(8, seed=1, at=3.0)
    after = np.concatenate([before, own + 2.0])  # only this class moves
    (carried,) = carry(
        {"own": accumulate(own)},
        before_NW=np.concatenate([before, own]).astype(np.float32),
        after_NW=after.astype(np.float32),
        labels_N=np.array([1] * 200 + [0] * 8),
        classes=("own", "others"),
    ).values()
    expected = (own + 2.0).mean(axis=0)
    assert np.abs(carried.mean_W - expected).max() < np.abs(own.mean(axis=0) - expected).max() / 2
