"""Keep count, mean and scatter of a class's embeddings, to fit a classifier without images.

The scatter is the sum of the outer products of deviations from the mean. It is held as a factor:
scatter = factorᵀ factor. The rows of a factor are the principal axes of the scatter, the longest
first, each as long as the root of its eigenvalue. For few images a factor is much smaller than the
scatter. It follows from the scatter alone, so it tells nothing more about single images.

N images, W channels of the embedding, R rows of a factor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from model_store.errors import ShardCorrupt
from model_store.records.manifest import ShardRef
from model_store.spec import statistics_tensors
from model_store.store.shard import check_shard, read_layout

Doubles = NDArray[np.float64]
_MOST_STAND_INS = 500
"""More embeddings of a class tell nothing new, as every class weighs the same."""
_TO_CONTINUE_BY = (16, 2000)
"""The fewest and the most images that the map to younger slices is fitted to."""
_RIDGES = np.geomspace(1e-3, 1e3, 13)
"""The penalties of that map to choose from, for channels of variance 1."""
SURE = 4.0
"""Images of a class at which what a map misses on them moves the mean half way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassStatistics:
    """The statistics of the embeddings of one class."""

    count: int
    mean_W: Doubles
    factor_RW: Doubles
    """It has min(count - 1, W) rows."""

    @property
    def scatter_WW(self) -> Doubles:
        return self.factor_RW.T @ self.factor_RW


def accumulate(embeddings_NW: NDArray[np.floating]) -> ClassStatistics:
    """Compute the statistics of at least one embedding, all of one class."""
    embeddings = embeddings_NW.astype(np.float64)
    mean_W = embeddings.mean(axis=0)
    return ClassStatistics(
        count=len(embeddings),
        mean_W=mean_W,
        factor_RW=factor_of(embeddings - mean_W, count=len(embeddings)),
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


def take_out(statistics: ClassStatistics, embeddings_NW: NDArray[np.floating]) -> ClassStatistics:
    """Compute the statistics without some of the embeddings that they have counted; at least one
    embedding is left."""
    gone = accumulate(embeddings_NW)
    count = statistics.count - gone.count
    mean_W = (statistics.count * statistics.mean_W - gone.count * gone.mean_W) / count
    apart_W = np.sqrt(count * gone.count / statistics.count) * (mean_W - gone.mean_W)
    away_RW = np.concatenate([gone.factor_RW, apart_W[None]])
    _, _, axes_KW = np.linalg.svd(
        np.concatenate([statistics.factor_RW, away_RW]), full_matrices=False
    )
    before, away = statistics.factor_RW @ axes_KW.T, away_RW @ axes_KW.T
    values, vectors = np.linalg.eigh(before.T @ before - away.T @ away)
    rows_KW = np.sqrt(np.maximum(values, 0.0))[:, None] * (vectors.T @ axes_KW)
    return ClassStatistics(count=count, mean_W=mean_W, factor_RW=factor_of(rows_KW, count=count))


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


def stand_ins(statistics: ClassStatistics, *, seed: int, most: int = _MOST_STAND_INS) -> Doubles:
    """Make embeddings that have the mean and the covariance of the class, and of no image in it.

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
    # The deviations of N embeddings from their mean have rank N - 1: a further row is rounding.
    kept = min(count - 1, rows_NW.shape[1])
    return np.asarray(lengths[:kept, None] * axes[:kept], dtype=np.float64)


Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Embeddings to fit a classifier to, and the statistics that follow from them."""

    embeddings_NV: Floats
    labels_N: NDArray[np.int64]
    real_N: NDArray[np.bool_]
    """False for stand-ins."""
    rows_N: NDArray[np.int64]
    """The place of each embedding's image among those that were given; -1 for stand-ins."""
    narrow: bool
    """Only the first slice is there, because too few images tell what follows in younger ones."""
    changed: Mapping[str, ClassStatistics]
    """The statistics of classes that have new images, or had none."""
    classes: tuple[str, ...]

    def without(self, retired: Collection[str]) -> Gathered:
        """Leave out classes that are not answered any more."""
        places = [place for place, name in enumerate(self.classes) if name in retired]
        stays_N = ~np.isin(self.labels_N, places)
        return replace(
            self,
            embeddings_NV=self.embeddings_NV[stays_N],
            labels_N=self.labels_N[stays_N],
            real_N=self.real_N[stays_N],
            rows_N=self.rows_N[stays_N],
            changed={name: one for name, one in self.changed.items() if name not in retired},
        )


def gather(
    embeddings_NW: Floats,
    labels_N: NDArray[np.int64],
    *,
    classes: Sequence[str],
    new: int,
    width: int,
    known: Mapping[str, ClassStatistics],
) -> Gathered:
    """Put stand-ins beside the embeddings of classes that have lost images.

    The first `new` embeddings are of images that no statistics have seen; all others are exemplars,
    which the `known` statistics of their class have counted.
    """
    is_new_N = np.arange(len(labels_N)) < new
    uses_N = np.ones(len(labels_N), dtype=bool)
    changed: dict[str, ClassStatistics] = {}
    made: list[_Made] = []
    for place, name in enumerate(classes):
        of_class_N, statistics = labels_N == place, known.get(name)
        fresh_N = of_class_N & is_new_N if statistics else of_class_N
        if fresh_N.any():
            added = accumulate(embeddings_NW[fresh_N, :width])
            changed[name] = merge(statistics, added) if statistics else added
        exemplars_N = of_class_N & ~fresh_N
        if statistics and exemplars_N.sum() < statistics.count:
            # Stand-ins have the exemplars in their mean, so the exemplars do not count twice.
            first = stand_ins(statistics, seed=place).astype(np.float32)
            made.append(_Made(place=place, first_MF=first, left=np.flatnonzero(of_class_N)))
            uses_N &= ~exemplars_N
    narrow = bool(made) and len(embeddings_NW) < _TO_CONTINUE_BY[0]
    used = width if narrow else embeddings_NW.shape[1]
    parts = [embeddings_NW[uses_N, :used]]
    if made and used > width:
        continued = _Continued.fit(embeddings_NW, width=width)
        parts += [continued(stand_in) for stand_in in made]
    else:
        parts += [stand_in.first_MF for stand_in in made]
    labels = [
        labels_N[uses_N],
        *(np.full(len(stand_in.first_MF), stand_in.place) for stand_in in made),
    ]
    stand_in_rows = np.full(sum(map(len, parts[1:])), -1)
    return Gathered(
        embeddings_NV=np.concatenate(parts),
        rows_N=np.concatenate([np.flatnonzero(uses_N), stand_in_rows]).astype(np.int64),
        labels_N=np.concatenate(labels),
        real_N=np.arange(sum(map(len, parts))) < int(uses_N.sum()),
        narrow=narrow,
        changed=changed,
        classes=tuple(classes),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    """Stand-ins for the images of a class: M of them, with the F channels of the first slice."""

    place: int
    first_MF: Floats
    left: NDArray[np.int64]
    """The rows of images that are left of the class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Continued:
    """A map from the first slice to the Y channels of younger experts, fitted to the K images that
    are left of all classes. The few images of one class would be trusted too much in these channels
    if they stood for all that are gone: the younger expert has learnt from them."""

    middle_F: Doubles
    scale_F: Doubles
    middle_Y: Doubles
    linear_FY: Doubles
    missed_KY: Doubles
    """What the map misses on each of the images when it is fitted to the others."""
    rows_K: NDArray[np.int64]

    @classmethod
    def fit(cls, embeddings_NW: Floats, *, width: int) -> _Continued:
        """Choose the penalty by leaving out one image after the other, in closed form."""
        images = len(embeddings_NW)
        rows_K = np.unique(np.linspace(0, images - 1, min(images, _TO_CONTINUE_BY[1])).round())
        chosen_KW = embeddings_NW[rows_K.astype(np.int64)].astype(np.float64)
        first_KF, younger_KY = chosen_KW[:, :width], chosen_KW[:, width:]
        middle_F, middle_Y = first_KF.mean(axis=0), younger_KY.mean(axis=0)
        deviation_F = first_KF.std(axis=0)
        scale_F = 1 / np.maximum(deviation_F, max(1e-3 * float(deviation_F.mean()), 1e-12))
        turned_KR, lengths_R, axes_RF = np.linalg.svd(
            (first_KF - middle_F) * scale_F, full_matrices=False
        )
        centred_KY = younger_KY - middle_Y
        along_RY = turned_KR.T @ centred_KY
        best: tuple[float, Doubles, Doubles] | None = None
        for ridge in _RIDGES * len(chosen_KW):
            share_R = np.square(lengths_R) / (np.square(lengths_R) + ridge)
            leverage_K = np.square(turned_KR) @ share_R + 1 / len(chosen_KW)
            missed_KY = centred_KY - turned_KR @ (share_R[:, None] * along_RY)
            missed_KY /= np.maximum(1 - leverage_K, 1e-3)[:, None]
            error = float(np.square(missed_KY).sum())
            if best is None or error < best[0]:
                inverse_R = np.where(lengths_R > 0, share_R / np.maximum(lengths_R, 1e-12), 0)
                best = error, missed_KY, axes_RF.T @ (inverse_R[:, None] * along_RY)
        assert best is not None
        return cls(
            middle_F=middle_F,
            scale_F=scale_F,
            middle_Y=middle_Y,
            linear_FY=best[2],
            missed_KY=best[1],
            rows_K=rows_K.astype(np.int64),
        )

    def __call__(self, made: _Made) -> Floats:
        """Add younger channels to stand-ins: mapped, moved by what the map misses on images of the
        class, and as uncertain as the map is."""
        younger_MY = (made.first_MF - self.middle_F) * self.scale_F @ self.linear_FY
        missed_LY = self.missed_KY[np.isin(self.rows_K, made.left)]
        moved_Y = missed_LY.sum(axis=0) / (len(missed_LY) + SURE)
        draw = np.random.default_rng(made.place)
        drawn_M = draw.integers(len(self.missed_KY), size=len(made.first_MF))
        younger_MY += self.middle_Y + moved_Y + self.missed_KY[drawn_M]
        return np.concatenate([made.first_MF, younger_MY.astype(np.float32)], axis=1)
