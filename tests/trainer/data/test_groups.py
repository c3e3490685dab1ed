"""Images that belong together stay on one side of every split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.errors import WrongUsage
from model_store.records.manifest import ClassImages, ShardRef
from tests.trainer.folders import Listening, write_classes
from trainer.data.exemplars import numbered, set_aside, shrink
from trainer.data.folders import LabelledImages, list_classes, read_images
from trainer.data.groups import numbers_of, with_groups
from trainer.data.sources.tables import list_table
from trainer.data.task_data import Split

Pixels = NDArray[np.uint8]


def films(count: int, frames: int, *, side: int = 32, seed: int = 0) -> LabelledImages:
    """Pictures of one sign in `count` places, each in some frames that move a little."""
    draw = np.random.default_rng(seed)
    sign = draw.integers(0, 255, size=(side, side, 3))
    pixels = []
    for _ in range(count):
        coarse = draw.integers(-90, 90, size=(4, 4, 3)).repeat(side // 4, 0).repeat(side // 4, 1)
        for _ in range(frames):
            frame = sign + coarse + draw.normal(0, 8, size=sign.shape)
            pixels.append(np.clip(frame, 0, 255).astype(np.uint8))
    return LabelledImages(
        classes=("sign",),
        pixels_NHWC=np.stack(pixels),
        labels_N=np.zeros(len(pixels), dtype=np.int64),
    )


def test_frames_of_one_film_are_found() -> None:
    found = numbers_of(with_groups(films(6, 5)))
    for film in range(6):
        assert len(set(found[5 * film : 5 * film + 5].tolist())) == 1
    assert len(set(found.tolist())) == 6


def test_different_pictures_are_left_alone() -> None:
    images = with_groups(films(30, 1))
    assert not any(images.groups)
    assert len(set(numbers_of(images).tolist())) == 30


def smooth(count: int, *, side: int, seed: int = 0) -> LabelledImages:
    """Pictures of few pixels, enlarged: half of them are of similar things."""
    draw = np.random.default_rng(seed)
    thing, others = draw.integers(0, 255, size=(3, 3, 3)), (count, 3, 3, 3)
    small = np.where(
        np.arange(count)[:, None, None, None] % 2,
        thing + draw.normal(0, 30, size=others),
        draw.integers(0, 255, size=others),
    )
    pixels = [
        np.asarray(
            Image.fromarray(one).resize((8, 8), Image.Resampling.BICUBIC).resize((side, side))
        )
        for one in np.clip(small, 0, 255).astype(np.uint8)
    ]
    return LabelledImages(
        classes=("thing",),
        pixels_NHWC=np.stack(pixels),
        labels_N=np.zeros(count, dtype=np.int64),
    )


@pytest.mark.parametrize("side", [8, 16, 64])
def test_similar_images_without_more_detail_than_thumbnails_are_not_joined(side: int) -> None:
    images = smooth(20, side=side)
    assert not any(with_groups(images).groups)


def test_copies_without_more_detail_than_thumbnails_are_joined() -> None:
    images = smooth(20, side=16)
    copied = images.take(np.array([*range(20), 3, 3, 5], dtype=np.int64))
    found = numbers_of(with_groups(copied))
    assert found[3] == found[20] == found[21]
    assert found[5] == found[22]
    assert len(set(found.tolist())) == 20


def test_two_copies_are_a_group_even_in_a_class_of_two() -> None:
    one = films(1, 1)
    both = LabelledImages(
        classes=one.classes,
        pixels_NHWC=np.concatenate([one.pixels_NHWC, one.pixels_NHWC]),
        labels_N=np.zeros(2, dtype=np.int64),
    )
    assert len(set(numbers_of(with_groups(both)).tolist())) == 1


def test_a_group_that_is_said_counts_before_looks() -> None:
    images = films(6, 5)
    said = with_groups(images.grouped([f"part {row % 5}" for row in range(30)]))
    assert said.groups == tuple(f"part {row % 5}" for row in range(30))


@pytest.mark.parametrize("seed", range(5))
def test_no_group_stands_on_both_sides(seed: int) -> None:
    images = films(12, 3)
    groups = np.arange(36) // 3
    named = images.grouped([str(group) for group in groups])
    learnt, held = set_aside(named, seed=seed, groups_N=groups)
    assert held.groups
    assert not set(learnt.groups) & set(held.groups)
    assert len(learnt) + len(held) == 36


def test_a_class_of_one_group_is_still_judged() -> None:
    images = films(1, 20)
    learnt, held = set_aside(images, seed=0, groups_N=np.zeros(20, dtype=np.int64))
    assert (len(learnt), len(held)) == (16, 4)


def test_a_column_says_which_images_belong_together(tmp_path: Path) -> None:
    write_classes(tmp_path, ["a"], images=4)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    rows = [f"a/{name},a,{'left' if place < 2 else ''}" for place, name in enumerate(files)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label,group", *rows]))
    [listing] = list_table(tmp_path / "list.csv").values()
    assert listing.classes[0].groups == ("left", "left", "", "")
    assert listing.notes == ()


def test_folders_in_class_folders_are_groups_where_asked(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", ["film-1", "film-2"], images=3)
    plain, grouped = (list_classes(tmp_path, with_groups=asked) for asked in (False, True))
    assert plain.images == 0
    assert grouped.images_by_class == {"a": 6}
    assert grouped.classes[0].groups == ("film-1",) * 3 + ("film-2",) * 3


def test_groups_come_with_the_images(tmp_path: Path) -> None:
    from model_store.records.manifest import Preprocessing

    write_classes(tmp_path / "a", ["film-1", "film-2"], images=3)
    images = read_images(
        list_classes(tmp_path, with_groups=True),
        preprocessing=Preprocessing(image_size=8),
        skip_bad=False,
        progress=Listening(),
    )
    split = Split.of(images, numbers_of(images))
    assert split.figures() == {
        "split_by": "groups of the data",
        "split_groups": 2,
        "split_together": 6,
    }


def test_the_store_keeps_groups_and_leaves_out_what_says_nothing() -> None:
    assert numbered(["x", "", "x", "", "y"]) == (0, 1, 0, 3, 4)
    assert numbered(["x", "y", ""]) == ()
    ref = ShardRef(kind="memory", sha256="0" * 64, bytes=1)
    entry = ClassImages(class_name="a", shard=ref, count=3, groups=(0, 1, 0))
    [smaller] = shrink([entry], quota=2)
    assert (smaller.count, smaller.groups) == (2, (0, 1))
    alone = ClassImages(class_name="a", shard=ref, count=3)
    assert "groups" not in alone.model_dump(by_alias=True)
    with pytest.raises(ValueError, match="other groups"):
        ClassImages(class_name="a", shard=ref, count=3, groups=(0, 1))


def test_folders_are_groups_of_classes_or_of_images_and_not_both(tmp_path: Path) -> None:
    from trainer.request import AddTask

    with pytest.raises(WrongUsage, match="give one of the two"):
        AddTask(data=tmp_path, store="models", hierarchy="folders", groups="folders")
