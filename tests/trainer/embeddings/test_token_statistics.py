"""Statistics of tokens are those of the very images, however the images came."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_store.errors import ShardCorrupt
from model_store.store.shard import shard_ref
from trainer.embeddings.statistics import (
    ClassStatistics,
    accumulate,
    decode,
    encode,
    merge,
    stand_ins,
)

Tokens = NDArray[np.float32]


@st.composite
def tokens(draw: st.DrawFn, *, width: int = 5) -> Tokens:
    """Few or many tokens, with channels that are constant or large at times."""
    count = draw(st.integers(1, 12))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scales = np.array(draw(st.lists(st.sampled_from([0.0, 0.1, 3.0]), min_size=5, max_size=5)))
    shift = draw(st.sampled_from([0.0, 20.0]))
    return (shift + scales * numbers.normal(size=(count, width))).astype(np.float32)


def mean_and_scatter(images: Tokens) -> tuple[list[float], list[list[float]]]:
    """Compute by loops over plain numbers, from the definition."""
    rows, width = [[float(x) for x in row] for row in images], images.shape[1]
    mean = [sum(row[i] for row in rows) / len(rows) for i in range(width)]
    scatter = [
        [sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in rows) for j in range(width)]
        for i in range(width)
    ]
    return mean, scatter


def check(found: ClassStatistics, images: Tokens, *, within: float = 1e-8) -> None:
    mean, scatter = mean_and_scatter(images)
    assert found.count == len(images)
    assert found.factor_RW.shape == (min(len(images) - 1, images.shape[1]), images.shape[1])
    assert found.mean_W == pytest.approx(np.array(mean), abs=within)
    largest = max(1.0, float(np.abs(scatter).max()))
    assert found.scatter_WW == pytest.approx(np.array(scatter), abs=within * largest)


@given(tokens())
def test_statistics_are_those_of_the_definition(images: Tokens) -> None:
    check(accumulate(images), images)


@given(tokens(), tokens())
def test_merging_is_the_same_as_having_seen_all_images_at_once(one: Tokens, other: Tokens) -> None:
    check(merge(accumulate(one), accumulate(other)), np.concatenate([one, other]))


@given(tokens())
def test_a_shard_gives_the_statistics_back(images: Tokens) -> None:
    before = accumulate(images)
    data = encode(before)
    after = decode(
        shard_ref("statistics", data), data, count=before.count, width=len(before.mean_W)
    )
    check(after, images, within=1e-5)


@pytest.mark.parametrize(("count", "width"), [(3, 4), (5, 4), (4, 3), (0, 4)])
def test_a_shard_of_another_shape_is_refused(count: int, width: int) -> None:
    data = encode(accumulate(np.random.default_rng(0).normal(size=(4, 4))))
    with pytest.raises(ShardCorrupt):
        decode(shard_ref("statistics", data), data, count=count, width=width)


def test_numbers_that_are_not_finite_are_refused() -> None:
    one = accumulate(np.random.default_rng(0).normal(size=(4, 4)))
    data = encode(replace(one, mean_W=np.full(4, np.inf)))
    with pytest.raises(ShardCorrupt, match="not finite"):
        decode(shard_ref("statistics", data), data, count=4, width=4)


@given(tokens())
def test_stand_ins_have_the_mean_and_the_scatter_of_the_images(images: Tokens) -> None:
    made = stand_ins(accumulate(images), seed=0)
    check(accumulate(made), images, within=1e-6)


def test_stand_ins_are_not_the_images() -> None:
    images = np.random.default_rng(0).normal(size=(10, 30))
    made = stand_ins(accumulate(images), seed=0)
    nearest = np.linalg.norm(made[:, None] - images[None], axis=2).min()
    assert nearest > 1.0


def test_fewer_stand_ins_than_images_keep_the_covariance() -> None:
    images = np.random.default_rng(0).normal(size=(200, 5))
    made = stand_ins(accumulate(images), seed=0, most=20)
    assert made.shape == (20, 5)
    assert made.mean(axis=0) == pytest.approx(images.mean(axis=0))
    assert np.cov(made.T, bias=True) == pytest.approx(np.cov(images.T, bias=True), abs=1e-9)
    assert stand_ins(accumulate(images), seed=0, most=3).shape == (3, 5)
