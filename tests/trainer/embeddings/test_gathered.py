"""A classifier is fitted to images where all are left, and to stand-ins where some are gone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.embeddings.statistics import ClassStatistics, Gathered, accumulate, gather

FIRST, WIDTH = 4, 6
CLASSES = ("old", "new")


def tokens_of(count: int, *, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


OLD, NEW = tokens_of(9, seed=0), tokens_of(20, seed=1)


def gathered(*, left: int, known: bool = True, new: int = 20) -> Gathered:
    """Gather images of a new class, and those that are left of nine of an old one."""
    tokens = np.concatenate([NEW, OLD[:left]])
    labels = np.array([1] * len(NEW) + [0] * left)
    found = {"old": accumulate(OLD[:, :FIRST])} if known else {}
    return gather(tokens, labels, classes=CLASSES, new=new, width=FIRST, known=found)


def same(one: ClassStatistics, tokens: NDArray[np.float32]) -> bool:
    other = accumulate(tokens[:, :FIRST])
    return (
        one.count == other.count
        and np.allclose(one.mean_W, other.mean_W, atol=1e-5)
        and np.allclose(one.scatter_WW, other.scatter_WW, atol=1e-4)
    )


def test_images_are_used_as_they_are_where_none_is_lost() -> None:
    found = gathered(left=9)
    assert found.real_N.all()
    assert np.array_equal(found.embeddings_NV, np.concatenate([NEW, OLD]))
    assert list(found.changed) == ["new"]


@pytest.mark.parametrize("left", [0, 1, 8])
def test_stand_ins_take_the_place_of_a_class_that_lost_images(left: int) -> None:
    found = gathered(left=left)
    old = found.embeddings_NV[found.labels_N == 0]
    assert len(old) == 9
    assert same(accumulate(old[:, :FIRST]), OLD)
    assert np.array_equal(found.real_N, found.labels_N == 1)
    assert not found.narrow
    assert found.embeddings_NV.shape[1] == WIDTH


def test_too_few_images_tell_nothing_of_the_channels_of_younger_experts() -> None:
    few = np.concatenate([NEW[:5], OLD[:1]])
    found = gather(
        few,
        np.array([1] * 5 + [0]),
        classes=CLASSES,
        new=5,
        width=FIRST,
        known={"old": accumulate(OLD[:, :FIRST])},
    )
    assert found.narrow
    assert found.embeddings_NV.shape == (5 + len(OLD), FIRST)


@pytest.mark.parametrize("lost", [(), (0, 1)], ids=["eight-left", "none-left-of-two-classes"])
def test_channels_of_younger_experts_follow_from_the_first_slice_of_all_images_that_are_left(
    lost: tuple[int, ...],
) -> None:
    draw = np.random.default_rng(3)
    names, each, left, width = tuple("abcdef"), 200, 8, 12
    centres_CF = draw.normal(size=(len(names), width)) * 2
    linear_FY = draw.normal(size=(width, 5)) / 3
    labels = np.repeat(np.arange(len(names)), each)
    first = centres_CF[labels] + draw.normal(size=(len(labels), width))
    younger = first @ linear_FY + draw.normal(size=(len(labels), 5)) * 0.3
    tokens = np.concatenate([first, younger], axis=1).astype(np.float32)
    kept = np.concatenate(
        [np.flatnonzero(labels == place)[:left] for place in range(len(names)) if place not in lost]
    )
    known = {name: accumulate(tokens[labels == place, :width]) for place, name in enumerate(names)}
    found = gather(tokens[kept], labels[kept], classes=names, new=0, width=width, known=known)
    assert not found.narrow
    assert not found.real_N.any()
    for place in range(len(names)):
        made, true = found.embeddings_NV[found.labels_N == place], tokens[labels == place]
        assert len(made) == each
        apart = np.abs(made[:, width:].mean(axis=0) - true[:, width:].mean(axis=0))
        # A map that has seen no image of a class goes further astray.
        assert apart.max() < (1.5 if place in lost else 0.5)
        # Copies of the images that are left would have a scatter of rank 7, and miss the relation.
        missed = made[:, width:] - made[:, :width] @ linear_FY
        assert missed.std() < 1.0


def test_exemplars_of_a_class_without_statistics_make_some() -> None:
    found = gathered(left=3, known=False)
    assert found.real_N.all()
    assert same(found.changed["old"], OLD[:3])


def test_more_images_of_a_class_are_added_to_its_statistics_and_exemplars_are_not() -> None:
    more = tokens_of(4, seed=2)
    tokens = np.concatenate([more, OLD[:3]])
    found = gather(
        tokens,
        np.zeros(7, dtype=np.int64),
        classes=("old",),
        new=4,
        width=FIRST,
        known={"old": accumulate(OLD[:, :FIRST])},
    )
    assert same(found.changed["old"], np.concatenate([OLD, more]))
    assert found.real_N.sum() == 4
    assert len(found.labels_N) == 4 + 9


def test_images_that_were_counted_before_change_no_statistics() -> None:
    assert gathered(left=9, new=0).changed.keys() == {"new"}
    counted = {"old": accumulate(OLD[:, :FIRST]), "new": accumulate(NEW[:, :FIRST])}
    tokens, labels = np.concatenate([NEW, OLD]), np.array([1] * len(NEW) + [0] * 9)
    found = gather(tokens, labels, classes=CLASSES, new=0, width=FIRST, known=counted)
    assert found.changed == {}
    assert found.real_N.all()


def test_retired_classes_are_left_out() -> None:
    found = gathered(left=0).without(["old"])
    assert set(found.labels_N.tolist()) == {1}
    assert found.real_N.all()
