from __future__ import annotations

import numpy as np
import pytest

from model_store.records.manifest import Preprocessing, ShardRef
from tests.trainer.folders import SIZE, labelled
from trainer.data.exemplars import (
    held_out_count,
    held_out_share,
    herding_order,
    keep,
    recall,
    set_aside,
    shrink,
)


def plain_herding(features: list[list[float]], count: int) -> list[int]:
    """iCaRL's algorithm 4, word by word."""

    def unit(vector: list[float]) -> list[float]:
        length = sum(value**2 for value in vector) ** 0.5
        return [value / length for value in vector]

    vectors = [unit(vector) for vector in features]
    width = len(vectors[0])
    mean = unit([sum(vector[d] for vector in vectors) / len(vectors) for d in range(width)])
    chosen: list[int] = []
    for size in range(1, count + 1):
        best, best_distance = -1, float("inf")
        for candidate in range(len(vectors)):
            if candidate in chosen:
                continue
            distance = 0.0
            for d in range(width):
                total = vectors[candidate][d] + sum(vectors[one][d] for one in chosen)
                distance += (mean[d] - total / size) ** 2
            if distance < best_distance:
                best, best_distance = candidate, distance
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_herding_agrees_with_the_plain_algorithm(seed: int) -> None:
    features = np.random.default_rng(seed).normal(size=(17, 6)).astype(np.float32)
    assert herding_order(features, count=10) == plain_herding(features.tolist(), 10)


def test_a_smaller_buffer_is_a_prefix_of_a_larger_one() -> None:
    features = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    assert herding_order(features, count=7) == herding_order(features, count=20)[:7]


def test_no_image_is_chosen_twice_even_if_all_look_the_same() -> None:
    assert sorted(herding_order(np.ones((5, 3), dtype=np.float32), count=9)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("images", "held_out"),
    [(2, 0), (9, 0), (10, 2), (20, 2), (34, 3), (100, 10), (200, 20), (5000, 20)],
)
def test_a_tenth_is_held_out_within_bounds(images: int, held_out: int) -> None:
    assert held_out_count(images) == held_out


@pytest.mark.parametrize(
    ("counts", "already", "share"),
    [
        pytest.param([40] * 5, 0, 0.2, id="few-images-in-all"),
        pytest.param([100] * 15, 0, 0.1 * 200 / 150, id="no-more-than-it-takes"),
        pytest.param([100] * 20, 0, 0.1, id="enough"),
        pytest.param([40] * 5, 180, 0.1, id="older-classes-count-too"),
        pytest.param([5] * 5, 0, 0.1, id="none-can-be-held-out"),
    ],
)
def test_more_is_held_out_where_the_gate_would_be_blind(
    counts: list[int], already: int, share: float
) -> None:
    images = {str(place): count for place, count in enumerate(counts)}
    assert held_out_share(images, already=already) == pytest.approx(share)


def test_held_out_images_are_never_trained_on() -> None:
    images = labelled([40, 9, 25])
    training, held_out = set_aside(images, seed=3)
    seen = {pixels.tobytes() for pixels in training.pixels_NHWC}
    aside = {pixels.tobytes() for pixels in held_out.pixels_NHWC}
    assert not seen & aside
    assert seen | aside == {pixels.tobytes() for pixels in images.pixels_NHWC}
    assert np.bincount(held_out.labels_N, minlength=3).tolist() == [8, 0, 5]


def test_the_same_seed_sets_the_same_images_aside() -> None:
    images = labelled([40, 30])
    (_, first), (_, again), (_, other) = (set_aside(images, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.pixels_NHWC, again.pixels_NHWC)
    assert (first.pixels_NHWC != other.pixels_NHWC).any()


def test_kept_images_come_back_pixel_by_pixel_and_in_order() -> None:
    images = labelled([4, 3])
    rows = {"a": [2, 0, 3], "b": [6]}
    entries, shards = keep(images, kind="memory", rows_by_class=rows)

    def read(ref: ShardRef) -> bytes:
        return shards[ref.sha256]

    back = recall(
        shrink(entries, quota=2),
        classes=("z", "a", "b"),
        read=read,
        preprocessing=Preprocessing(image_size=SIZE),
    )
    assert back.labels_N.tolist() == [1, 1, 2]
    np.testing.assert_array_equal(back.pixels_NHWC, images.pixels_NHWC[[2, 0, 6]])


def test_a_smaller_memory_keeps_the_shards_and_lowers_the_counts() -> None:
    entries, _ = keep(labelled([5, 2]), kind="memory", rows_by_class={"a": range(5), "b": [5, 6]})
    smaller = shrink(entries, quota=3)
    assert [entry.shard for entry in smaller] == [entry.shard for entry in entries]
    assert [entry.count for entry in smaller] == [3, 2]
    assert shrink(entries, quota=0) == ()
