"""Images that look alike stand together, whatever else waits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from dne_serve.loop.groups import group
from dne_serve.loop.writer import pack_direction, unpack_direction
from model_store.loop.items import Item
from tests.model_store.loop.items import item_record

Floats = NDArray[np.float64]


def items_of(*kinds: int, seed: int = 0, noise: float = 0.4) -> list[Item]:
    """Items whose tokens stand around the middle of their kind."""
    chance = np.random.default_rng(seed)
    middles = chance.normal(size=(max(kinds) + 1, 64))
    return [
        item_with(middles[kind] + noise * chance.normal(size=64), label=f"kind {kind}")
        for kind in kinds
    ]


def item_with(token: Floats | None, *, label: str = "cat", unknown: float | None = None) -> Item:
    text = None if token is None else pack_direction(token)
    record = item_record("a thing", label=label, token=text, unknown_score=unknown)
    return Item(record=record, head=None)


def test_kinds_stand_together_and_the_largest_group_comes_first() -> None:
    items = items_of(0, 1, 2, 1, 0, 1, 2, 1, 1, 0, 2, 1)
    found = group(items)
    assert found.by == "tokens"
    assert [len(one) for one in found.groups] == [6, 3, 3]
    for one in found.groups:
        assert len({item.record.top[0].label for item in one}) == 1


def test_a_group_of_unknown_things_comes_before_a_larger_one_of_known_things() -> None:
    known = [item_with(None, label="cat", unknown=0.1) for _ in range(9)]
    new = [item_with(None, label="dog", unknown=0.8) for _ in range(4)]
    alone = [
        item_with(None, label=label, unknown=score) for label, score in (("a", 0.2), ("b", 1.0))
    ]
    found = group([*known, *alone, *new])
    assert [one[0].record.top[0].label for one in found.groups] == ["dog", "cat"]
    assert [one.record.top[0].label for one in found.others] == ["b", "a"]


def test_every_item_is_in_one_group() -> None:
    items = [*items_of(*range(5), *range(5)), item_with(None), item_with(np.ones(32))]
    found = group(items)
    grouped = [item.record.id for one in (*found.groups, found.others) for item in one]
    assert sorted(grouped) == sorted(item.record.id for item in items)


def test_without_tokens_items_are_grouped_by_their_nearest_class() -> None:
    names = ("cat", "dog", "cat", "cat")
    found = group([item_with(None, label=name) for name in names])
    assert found.by == "labels"
    assert [[item.record.top[0].label for item in one] for one in found.groups] == [["cat"] * 3]
    assert [item.record.top[0].label for item in found.others] == ["dog"]


def test_without_scipy_items_are_grouped_by_their_nearest_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.cluster.hierarchy", None)
    assert group(items_of(0, 1, 0)).by == "labels"


def test_nothing_waits() -> None:
    assert (group([]).groups, group([]).others) == ([], [])


def test_the_direction_of_a_token_is_kept() -> None:
    chance = np.random.default_rng(0)
    one, other = chance.normal(size=(2, 384)) * [[1e-3], [1e3]]
    kept = [unpack_direction(pack_direction(token) or "") for token in (one, other)]
    true = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    found = kept[0] @ kept[1] / np.linalg.norm(kept[0]) / np.linalg.norm(kept[1])
    assert abs(true - found) < 0.01


@pytest.mark.parametrize("token", [np.zeros(8), np.full(8, np.nan), np.full(8, np.inf)])
def test_a_token_without_a_direction_is_none(token: Floats) -> None:
    assert pack_direction(token) is None
