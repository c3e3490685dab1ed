from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from trainer.data.augment import AFFINES, RECOLOURS, Augmentation

BATCH = 64


def photos(count: int = BATCH, *, size: int = 16) -> Tensor:
    return torch.rand(count, 3, size, size, generator=Generator().manual_seed(5))


def augmented(name: str, images: Tensor, *, seed: int = 0, flip: bool | None = None) -> Tensor:
    return Augmentation.named(name, flip=flip)(images, Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["standard", "light"])
def test_the_same_seed_changes_images_in_the_same_way(name: str) -> None:
    images = photos()
    assert torch.equal(augmented(name, images), augmented(name, images))
    assert not torch.equal(augmented(name, images), augmented(name, images, seed=1))


@pytest.mark.parametrize("name", ["standard", "light", "none"])
def test_images_stay_images_and_the_originals_stay_untouched(name: str) -> None:
    images = photos()
    before = images.clone()
    changed = augmented(name, images)
    assert changed.shape == images.shape
    assert changed.isfinite().all()
    assert changed.min() >= -1e-6
    assert changed.max() <= 1 + 1e-6
    assert torch.equal(images, before)


def test_none_changes_nothing() -> None:
    images = photos()
    assert torch.equal(augmented("none", images), images)


def test_each_image_draws_changes_of_its_own() -> None:
    same = photos(1).repeat(BATCH, 1, 1, 1)
    changed = augmented("standard", same)
    assert len({image.numpy().tobytes() for image in changed}) > BATCH // 2


def test_light_without_flips_only_shifts_by_whole_pixels_within_the_padding() -> None:
    images, size, padding = photos(), 16, 2
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    shifts = [
        padded[:, :, y : y + size, x : x + size]
        for y in range(2 * padding + 1)
        for x in range(2 * padding + 1)
    ]
    for index, changed in enumerate(augmented("light", images, flip=False)):
        near = [torch.allclose(changed, shift[index], atol=1e-4) for shift in shifts]
        assert sum(near) == 1


def test_about_half_of_the_images_are_mirrored_where_that_is_asked() -> None:
    only_flips = Augmentation(crop=False, flip=True, rand_augment=False)
    images = photos(400)
    changed = only_flips(images, Generator().manual_seed(0))
    mirrored = [
        torch.allclose(*pair, atol=1e-4) for pair in zip(changed, images.flip(3), strict=True)
    ]
    kept = [torch.allclose(*pair, atol=1e-4) for pair in zip(changed, images, strict=True)]
    assert sum(mirrored) + sum(kept) == 400
    assert 150 < sum(mirrored) < 250


@pytest.mark.parametrize("move", AFFINES)
def test_a_move_of_strength_zero_is_no_move(move: object) -> None:
    assert callable(move)
    torch.testing.assert_close(move(torch.zeros(3)), torch.eye(3).repeat(3, 1, 1))


@pytest.mark.parametrize("recolour", RECOLOURS)
@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.0, 1.0])
def test_recoloured_images_stay_between_black_and_white(recolour: object, strength: float) -> None:
    assert callable(recolour)
    changed = recolour(photos(4), torch.full((4,), strength))
    assert changed.shape == (4, 3, 16, 16)
    assert 0 <= changed.min() <= changed.max() <= 1 + 1e-6


def test_auto_spares_images_that_are_too_small_for_strong_changes() -> None:
    small, usual = (Augmentation.named("auto", image_size=size) for size in (16, 32))
    assert (small.crop, small.flip, small.rand_augment) == (True, False, False)
    assert (usual.crop, usual.flip, usual.rand_augment) == (True, True, True)
    assert not Augmentation.named("auto", image_size=32, flip=False).flip
    assert Augmentation.named("auto", image_size=16, flip=True).flip


@pytest.mark.parametrize(("epochs", "size", "rand_augment"), [(99, 32, False), (100, 32, True)])
def test_few_epochs_have_crop_and_flip(epochs: int, size: int, rand_augment: bool) -> None:
    chosen = Augmentation.named("auto", image_size=size, epochs=epochs)
    assert chosen == Augmentation(crop=True, flip=True, rand_augment=rand_augment)
    assert not Augmentation.named("auto", image_size=size, epochs=epochs, flip=False).flip
    small = Augmentation.named("auto", image_size=16, epochs=epochs)
    assert small == Augmentation(crop=True, flip=False, rand_augment=False)


def test_auto_crops_and_mirrors_and_no_more_where_a_pre_trained_expert_is_read() -> None:
    auto = Augmentation.named("auto", image_size=224, on_pretrained=True)
    assert (auto.crop, auto.flip, auto.rand_augment) == (True, True, False)
    assert not Augmentation.named("auto", flip=False, on_pretrained=True).flip
    assert Augmentation.named("standard", on_pretrained=True).rand_augment
