"""Tasks, images and memory follow from the data set, the preset and the seed alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.cell import preprocessing_of
from lab.dataset import Dataset, read_dataset
from lab.presets import PRESETS, changed
from lab.protocol import TRIAL_TEST, Memory, make_protocol
from model_store.errors import DataRejected, WrongUsage
from tests.lab.synthetic import CLASSES, write_zip

MINI = replace(PRESETS["mini"], image_size=8, images=10)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = write_zip(tmp_path_factory.mktemp("data") / "data.zip", train=20, test=4)
    return read_dataset(path, preprocessing=preprocessing_of(MINI))


def means(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    flat: NDArray[np.float32] = pixels.reshape(len(pixels), -1).astype(np.float32)
    return flat


def test_a_seed_fixes_the_order_of_the_classes(data: Dataset) -> None:
    first, again, other = (make_protocol(data, MINI, seed=seed) for seed in (0, 0, 1))
    assert [len(task) for task in first.tasks] == [2, 2, 2]
    assert sorted(first.classes_until(2)) == sorted(CLASSES)
    assert first.tasks == again.tasks != other.tasks
    assert first.order_digest == again.order_digest != other.order_digest


def test_images_are_labelled_in_the_order_of_learning(data: Dataset) -> None:
    protocol = make_protocol(data, MINI, seed=0)
    new = protocol.new_images(1)
    assert sorted(set(new.labels_N.tolist())) == [2, 3]
    assert len(new) == 2 * 10
    name = protocol.tasks[1][0]
    theirs = data.test.pixels_NHWC[data.test.rows_of(name)]
    ours = protocol.test_images(1)
    assert np.array_equal(ours.pixels_NHWC[ours.labels_N == 2], theirs)


def test_every_seed_has_the_same_images(data: Dataset) -> None:
    sets = []
    for seed in (0, 1):
        protocol = make_protocol(data, MINI, seed=seed)
        pixels = protocol.train.pixels_NHWC
        sets.append({one.tobytes() for one in pixels})
    assert sets[0] == sets[1]
    assert len(sets[0]) == 60


def test_a_trial_takes_no_image_of_the_table(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "data.zip", train=20 + TRIAL_TEST, test=2)
    data = read_dataset(path, preprocessing=preprocessing_of(MINI))
    table = make_protocol(data, MINI, seed=0)
    trial = make_protocol(data, replace(MINI, part="trial"), seed=0)
    pixels = [
        {one.tobytes() for one in images.pixels_NHWC}
        for images in (table.train, table.test, trial.train, trial.test)
    ]
    assert [len(one) for one in pixels] == [60, 12, 60, 6 * TRIAL_TEST]
    assert len(set.union(*pixels)) == sum(map(len, pixels))


def test_a_trial_on_classes_of_its_own_takes_no_class_of_a_table(data: Dataset) -> None:
    table = replace(MINI, classes=None, step=1, table_classes=3)
    trial = replace(table, part="trial", images=20)
    pools = [
        {name for seed in range(4) for name in make_protocol(data, one, seed=seed).classes_until(1)}
        for one in (table, trial)
    ]
    assert [len(one) for one in pools] == [3, 3]
    assert set.union(*pools) == set(CLASSES)
    orders = {make_protocol(data, table, seed=seed).tasks for seed in range(4)}
    assert len(orders) > 1
    assert len(make_protocol(data, trial, seed=0).test) == 3 * 4


def test_random_exemplars_are_a_prefix_of_the_images(data: Dataset) -> None:
    protocol, memory = make_protocol(data, MINI, seed=0), Memory(herds=False)
    images, names = protocol.new_images(0), protocol.tasks[0]
    memory.choose(images, names=names, quota=4, features=means)
    for name in names:
        assert np.array_equal(memory.kept[name], images.pixels_NHWC[images.rows_of(name)][:4])


def test_classes_and_images_that_are_missing_are_told(data: Dataset) -> None:
    with pytest.raises(DataRejected, match="has 6 classes; 8 are needed"):
        make_protocol(data, replace(MINI, classes=8), seed=0)
    with pytest.raises(DataRejected, match="6 classes cannot be cut into 2 and steps of 3"):
        make_protocol(data, replace(MINI, step=3), seed=0)
    with pytest.raises(DataRejected, match="fewer than 21 training images of 'ant', 'bee'"):
        make_protocol(data, replace(MINI, images=21), seed=0)


def test_settings_are_whole_numbers_that_the_preset_has() -> None:
    assert changed(MINI, "memory=0,step=4").step == 4
    with pytest.raises(WrongUsage, match="no setting 'memori'; the settings: first, step, memory"):
        changed(MINI, "memori=5")
    for wrong in ("step=0", "step=-2", "step=x", "step"):
        with pytest.raises(WrongUsage, match="step must be a whole number from 1 on"):
            changed(MINI, wrong)


def test_the_memory_keeps_the_best_exemplars_when_its_quota_shrinks(data: Dataset) -> None:
    protocol, memory = make_protocol(data, MINI, seed=0), Memory()
    for task, quota in ((0, 4), (1, 2)):
        images, names = protocol.new_images(task), protocol.tasks[task]
        memory.choose(images, names=names, quota=quota, features=means)
        if task == 0:
            before = {name: pixels.copy() for name, pixels in memory.kept.items()}
    assert {name: len(pixels) for name, pixels in memory.kept.items()} == dict.fromkeys(
        protocol.classes_until(1), 2
    )
    for name, pixels in before.items():
        assert np.array_equal(memory.kept[name], pixels[:2])
    kept = memory.images(protocol.classes_until(1))
    assert kept is not None
    assert kept.labels_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
