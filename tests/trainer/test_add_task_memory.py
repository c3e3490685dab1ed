"""Images that a version keeps, and how the next task uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.codec import decode_images
from model_store.maintenance.forget import forget_class
from model_store.preprocess import read_pixels
from model_store.records.manifest import ClassImages
from model_store.store.store import Store
from tests.trainer.folders import Listening, asked, learn, write_classes
from trainer.request import NetworkShape

LATER = NetworkShape()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "digits", ["0", "1", "2"])


def pixels_kept(store: Path, entries: tuple[ClassImages, ...]) -> list[bytes]:
    opened = Store.open(str(store))
    preprocessing = opened.manifest(1).preprocessing
    return [
        read_pixels(image, preprocessing).tobytes()
        for entry in entries
        for image in decode_images(opened.read_shard(entry.shard), count=entry.count)
    ]


def test_held_out_images_are_kept_and_never_among_the_exemplars(store: Path, letters: Path) -> None:
    manifest = learn(asked(store, letters)).manifest
    held_out = pixels_kept(store, manifest.held_out)
    memory = pixels_kept(store, manifest.memory)
    assert (len(held_out), len(memory)) == (4, 20)
    assert not set(held_out) & set(memory)


def test_the_memory_of_old_classes_shrinks_by_count_and_its_shards_stay(
    store: Path, letters: Path, digits: Path
) -> None:
    one = learn(asked(store, letters, memory=10)).manifest
    two = learn(asked(store, digits, shape=LATER, memory=10)).manifest
    assert [entry.count for entry in one.memory] == [5, 5]
    assert [entry.count for entry in two.memory] == [2, 2, 2, 2, 2]
    assert [entry.shard for entry in two.memory[:2]] == [entry.shard for entry in one.memory]
    assert two.held_out[:2] == one.held_out
    before = pixels_kept(store, one.memory)
    assert pixels_kept(store, two.memory[:2]) == [*before[:2], *before[5:7]]


def test_a_memory_of_none_keeps_no_exemplars_and_still_learns(
    store: Path, letters: Path, digits: Path
) -> None:
    assert learn(asked(store, letters, memory=0)).manifest.memory == ()
    progress = Listening()
    second = learn(asked(store, digits, shape=LATER, memory=0), progress=progress)
    assert second.manifest.memory == ()
    assert "balancing" not in progress.phases


def test_old_classes_are_balanced_from_their_exemplars(
    store: Path, letters: Path, digits: Path
) -> None:
    first, second = Listening(), Listening()
    learn(asked(store, letters), progress=first)
    assert first.phases[:3] == ["reading images", "learning", "choosing exemplars"]
    learn(asked(store, digits, shape=LATER), progress=second)
    assert second.phases[:3] == ["reading images", "learning", "balancing"]


def test_a_class_whose_pictures_were_forgotten_does_not_stop_the_next_task(
    store: Path, letters: Path, digits: Path
) -> None:
    learn(asked(store, letters))
    opened = Store.open(str(store))
    forget_class(opened, "a", actor="tests", reason="asked to")
    learn(asked(store, digits, shape=LATER))
    child = opened.manifest(2)
    assert "a" in child.spec.classes
    assert "a" not in {entry.class_name for entry in (*child.memory, *child.held_out)}
    assert not opened.verify().problems
