"""Keep count, mean and scatter of the tokens of a class: enough to fit a classifier without images.

The scatter is the sum of the outer products of deviations from the mean. It is held as a factor:
scatter = factorᵀ factor. The rows of a factor are the principal axes of the scatter, the longest
first, each as long as the root of its eigenvalue. For few images a factor is much smaller than the
scatter. It follows from the scatter alone, so it tells nothing more about single images.

N images, W channels of the token, R rows of a factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from model_store.errors import ShardCorrupt
from model_store.records.manifest import ShardRef
from model_store.spec import statistics_tensors
from model_store.store.shard import check_shard, read_layout

Doubles = NDArray[np.float64]
MOST_STAND_INS = 500
"""More tokens of a class tell nothing new, as every class weighs the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassStatistics:
    """The statistics of the tokens of one class."""

    count: int
    mean_W: Doubles
    factor_RW: Doubles
    """It has min(count - 1, W) rows."""

    @property
    def scatter_WW(self) -> Doubles:
        return self.factor_RW.T @ self.factor_RW


def accumulate(tokens_NW: NDArray[np.floating]) -> ClassStatistics:
    """Compute the statistics of at least one token, all of one class."""
    tokens = tokens_NW.astype(np.float64)
    mean_W = tokens.mean(axis=0)
    return ClassStatistics(
        count=len(tokens), mean_W=mean_W, factor_RW=factor_of(tokens - mean_W, count=len(tokens))
    )


def merge(one: ClassStatistics, other: ClassStatistics) -> ClassStatistics:
    """Compute the statistics of all images of both."""
    count = one.count + other.count
    apart_W = np.sqrt(one.count * other.count / count) * (one.mean_W - other.mean_W)
    rows = np.concatenate([one.factor_RW, other.factor_RW, apart_W[None]])
    return ClassStatistics(
        count=count,
        mean_W=(one.count * one.mean_W + other.count * other.mean_W) / count,
        factor_RW=factor_of(rows, count=count),
    )


def encode(statistics: ClassStatistics) -> bytes:
    """Write the statistics as a shard. The count is not in it: the manifest has the count."""
    return save(
        {
            "mean": statistics.mean_W.astype(np.float32),
            "factor": np.ascontiguousarray(statistics.factor_RW, dtype=np.float32),
        }
    )


def decode(ref: ShardRef, data: bytes, *, count: int, width: int) -> ClassStatistics:
    """Read a shard of statistics. Raise ShardCorrupt unless it has the right shape."""
    if count < 1:
        raise ShardCorrupt(ref.sha256, f"it is said to stand for {count} images")
    check_shard(ref, data, expected=statistics_tensors(images=count, width=width))
    arrays = {
        name: np.frombuffer(data[stored.start : stored.end], dtype="<f4").reshape(stored.shape)
        for name, stored in read_layout(data).items()
    }
    return ClassStatistics(
        count=count,
        mean_W=arrays["mean"].astype(np.float64),
        factor_RW=arrays["factor"].astype(np.float64),
    )


def stand_ins(statistics: ClassStatistics, *, seed: int, most: int = MOST_STAND_INS) -> Doubles:
    """Make tokens that have the mean and the covariance of the class, and of no image in it.

    There are as many as images, or `most`. Of a covariance with more axes than that, the longest
    are kept.
    """
    count = min(statistics.count, most)
    factor_RW = statistics.factor_RW[: count - 1]
    drawn = np.random.default_rng(seed).normal(size=(count, len(factor_RW)))
    # Orthonormal columns that sum to zero: mean and scatter come out as they were.
    columns, _ = np.linalg.qr(drawn - drawn.mean(axis=0))
    scale = np.sqrt(count / statistics.count)
    return np.asarray(statistics.mean_W + scale * columns @ factor_RW, dtype=np.float64)


def factor_of(rows_NW: Doubles, *, count: int) -> Doubles:
    """Make the factor R for `count` images, with RᵀR = rowsᵀ rows."""
    _, lengths, axes = np.linalg.svd(rows_NW, full_matrices=False)
    # The deviations of N tokens from their mean have rank N - 1: a further row is rounding.
    kept = min(count - 1, rows_NW.shape[1])
    return np.asarray(lengths[:kept, None] * axes[:kept], dtype=np.float64)
