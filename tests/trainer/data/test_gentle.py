"""Gentle changes move and recolour images a little, and mirror only where it is allowed."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tests.trainer.data.test_augment import photos
from trainer.data.augment import GentleChanges
from trainer.ranks.ranks import BatchPart


def changed(images: Tensor, *, flip: bool = False, seed: int = 0) -> Tensor:
    return GentleChanges(flip=flip)(images, Generator().manual_seed(seed))


def test_images_stay_images_and_the_originals_stay_untouched() -> None:
    images = photos()
    before = images.clone()
    after = changed(images)
    assert after.shape == images.shape
    assert after.min() >= 0
    assert after.max() <= 1
    assert torch.equal(images, before)
    assert not torch.equal(after, images)


def test_the_same_seed_changes_images_in_the_same_way() -> None:
    images = photos()
    assert torch.equal(changed(images), changed(images))
    assert not torch.equal(changed(images), changed(images, seed=1))


def test_the_border_is_repeated_and_not_black() -> None:
    white = torch.full((16, 3, 16, 16), 0.5)
    after = changed(white)
    spread = after.amax(dim=(1, 2, 3)) - after.amin(dim=(1, 2, 3))
    assert spread.max() < 1e-5  # brightness moves all pixels of an image alike


def test_images_are_mirrored_only_where_it_is_allowed() -> None:
    left = torch.zeros(64, 3, 16, 16)
    left[..., :4] = 1.0
    brighter_left = [
        (after[..., :8].mean(dim=(1, 2, 3)) > after[..., 8:].mean(dim=(1, 2, 3))).float().mean()
        for after in (changed(left), changed(left, flip=True))
    ]
    assert brighter_left[0] == 1
    assert 0.2 < brighter_left[1] < 0.8


def test_a_part_of_a_batch_changes_as_the_whole_batch_does() -> None:
    images = photos(10)
    whole = changed(images)
    parts = [
        GentleChanges(flip=False)(images[part.rows], Generator().manual_seed(0), part)
        for part in (BatchPart.of(10, rank=rank, ranks=2) for rank in range(2))
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
