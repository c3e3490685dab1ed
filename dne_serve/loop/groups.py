"""Group images that look alike, so that many images of a new class get their label at once.

Groups are clusters of tokens: average linkage by cosine, after their mean is subtracted. This needs
scipy; without it, images are grouped by their nearest class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dne_serve.loop.writer import unpack_direction
from model_store.loop.items import Item

By = Literal["tokens", "labels"]
FEWEST = 3
"""The fewest items of a group. The items of smaller groups come last, together."""
_FARTHEST = 0.7
"""The largest mean cosine distance within a group. Of 60 images of two new classes among 200, five
groups hold 45, with three images of other classes (ADR 068)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Items by group, large groups of unknown images first. `by` is what a group shares."""

    groups: list[list[Item]]
    others: list[Item]
    """Items that look like hardly any other, unknown images first."""
    by: By


def group(items: Sequence[Item]) -> Groups:
    """Group items. Items without a token, and tokens of different widths, are grouped apart."""
    linkage = _has_linkage()
    parts: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        token = item.record.token if linkage else None
        parts[
            len(token) if token else ("label", item.record.answer and item.record.answer.label)
        ].append(item)
    groups = [
        cluster
        for key, part in parts.items()
        for cluster in (_alike(part) if isinstance(key, int) else [part])
    ]
    by: By = "tokens" if any(isinstance(key, int) for key in parts) else "labels"
    others = [item for cluster in groups if len(cluster) < FEWEST for item in cluster]
    large = [cluster for cluster in groups if len(cluster) >= FEWEST]
    return Groups(
        groups=sorted(large, key=_worth, reverse=True),
        others=sorted(others, key=_unknown_score, reverse=True),
        by=by,
    )


def _worth(items: Sequence[Item]) -> float:
    """Return the value of labelling a group: high for large groups and for unknown images."""
    return float(np.mean([_unknown_score(item) for item in items]) * np.sqrt(len(items)))


def _unknown_score(item: Item) -> float:
    """Return the score for unknown images; 0.5 if the version has none."""
    score = item.record.unknown_score
    return 0.5 if score is None else score


def _alike(items: Sequence[Item]) -> list[list[Item]]:
    """Cluster items by their tokens. The items nearest to the middle of a cluster come first."""
    if len(items) < 3:
        return [[item] for item in items]
    unit_ND = _directions([item.record.token or "" for item in items])
    names_N = _linked(unit_ND)
    clusters = []
    for name in np.unique(names_N):
        places = np.flatnonzero(names_N == name)
        nearness = unit_ND[places] @ unit_ND[places].mean(axis=0)
        clusters.append([items[place] for place in places[np.argsort(-nearness)]])
    return clusters


def _directions(tokens: Sequence[str]) -> NDArray[np.float32]:
    """Return unit vectors of tokens, without their mean, which all images share."""
    all_ND = np.stack([unpack_direction(token) for token in tokens])
    all_ND /= np.maximum(np.linalg.norm(all_ND, axis=1, keepdims=True), 1e-6)
    all_ND -= all_ND.mean(axis=0)
    length_N1 = np.linalg.norm(all_ND, axis=1, keepdims=True)
    return np.asarray(all_ND / np.maximum(length_N1, 1e-6), dtype=np.float32)


def _linked(unit_ND: NDArray[np.float32]) -> NDArray[np.int32]:
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distance_NN = np.clip(1.0 - (unit_ND @ unit_ND.T).astype(np.float64), 0.0, 2.0)
    np.fill_diagonal(distance_NN, 0.0)
    tree = linkage(squareform(distance_NN, checks=False), "average")
    return np.asarray(fcluster(tree, _FARTHEST, "distance"), dtype=np.int32)


def _has_linkage() -> bool:
    try:
        import scipy.cluster.hierarchy  # noqa: F401 – only to see whether it is installed
    except ImportError:
        return False
    return True
