"""Put images that look alike together, so that a pile of one new thing is named at once.

Tokens that point alike belong together: average linkage by the cosine of tokens, less their mean.
scipy does it, if it is installed; else images are grouped by their nearest class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dne_serve.collecting.tokens import unpacked
from model_store.inbox.reading import Item

By = Literal["tokens", "labels"]
FEWEST = 3
"""Fewer items are no group: they stand together at the end, with all others like them."""
FARTHEST = 0.7
"""The mean cosine distance within a group at most. Of 60 images of two new things among 200, five
groups hold 45, with three strangers among them (ADR 068)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Items by group, large groups of unknown images first. `by` tells what they have in common."""

    groups: list[list[Item]]
    others: list[Item]
    """Items that hardly any other is like, unknown images first."""
    by: By


def group(items: Sequence[Item]) -> Groups:
    """Group items. Those without a token, or with one of another width, are grouped apart."""
    linkage = _has_linkage()
    parts: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        token = item.record.token if linkage else None
        parts[len(token) if token else ("label", item.record.answer.label)].append(item)
    groups = [
        one
        for key, part in parts.items()
        for one in (_alike(part) if isinstance(key, int) else [part])
    ]
    by: By = "tokens" if any(isinstance(key, int) for key in parts) else "labels"
    others = [item for one in groups if len(one) < FEWEST for item in one]
    return Groups(
        groups=sorted((one for one in groups if len(one) >= FEWEST), key=_worth, reverse=True),
        others=sorted(others, key=_doubt, reverse=True),
        by=by,
    )


def _worth(items: Sequence[Item]) -> float:
    """Tell how much is won by naming a group: large ones first, and those of things that no class
    is like."""
    return float(np.mean([_doubt(item) for item in items]) * np.sqrt(len(items)))


def _doubt(item: Item) -> float:
    """Return the score of unknown images. What a version has no score for may be either."""
    score = item.record.unknown_score
    return 0.5 if score is None else score


def _alike(items: Sequence[Item]) -> list[list[Item]]:
    """Part items by their tokens. The items nearest to the middle of a group come first."""
    if len(items) < 3:
        return [[item] for item in items]
    unit_ND = _directions([item.record.token or "" for item in items])
    names_N = _linked(unit_ND)
    found = []
    for name in np.unique(names_N):
        places = np.flatnonzero(names_N == name)
        nearness = unit_ND[places] @ unit_ND[places].mean(axis=0)
        found.append([items[place] for place in places[np.argsort(-nearness)]])
    return found


def _directions(tokens: Sequence[str]) -> NDArray[np.float32]:
    """Return unit vectors of tokens, less the mean of all: what all images share tells nothing."""
    all_ND = np.stack([unpacked(one) for one in tokens])
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
    return np.asarray(fcluster(tree, FARTHEST, "distance"), dtype=np.int32)


def _has_linkage() -> bool:
    try:
        import scipy.cluster.hierarchy  # noqa: F401 – only to see whether it is there
    except ImportError:
        return False
    return True
