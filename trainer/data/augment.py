"""Change training images at random: crop with padding, flip, and RandAugment.

Every image draws its own changes, and all draws come from one generator: the same generator
state gives the same images. All affine changes of an image (crop, flip, rotation, shear) are one
resampling; colours follow. Images are float, 0 to 1, [B, 3, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from trainer.ranks.ranks import BatchPart

_PADDING_SHARE = 1 / 8  # 4 pixels of 32
_SMALLEST_FOR_STANDARD = 32
"""The smallest image side for `standard`: its shifts and rotations destroy smaller images."""
_EPOCHS_FOR_STANDARD = 100
"""The fewest epochs for `standard`: in fewer, images that are changed less are learnt faster."""
_OPERATIONS_PER_IMAGE = 2
_MAGNITUDE = 0.9
_MAGNITUDE_STD = 0.05
CHANCE = 0.5  # that a drawn operation is carried out
_MAX_SHEAR = 0.3
_MAX_SHIFT = 0.45  # of the image's width
_MAX_ROTATION = math.radians(30)


class Changes(Protocol):
    """Random changes to a batch of images, or to a part of it."""

    def __call__(
        self, images_BCHW: Tensor, generator: Generator, part: BatchPart | None = None, /
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The kinds of changes. `Augmentation.named` knows the choices of the command line."""

    crop: bool
    flip: bool
    rand_augment: bool

    @classmethod
    def named(
        cls,
        name: str,
        *,
        flip: bool | None = None,
        image_size: int | None = None,
        on_pretrained: bool = False,
        epochs: int | None = None,
    ) -> Augmentation:
        """Resolve a name. `auto` is `standard`, or `light` for small images; beside a pre-trained
        expert, and in few epochs of larger images, `auto` is crop and flip."""
        small = image_size is not None and image_size < _SMALLEST_FOR_STANDARD
        short = epochs is not None and epochs < _EPOCHS_FOR_STANDARD
        if name == "auto" and (on_pretrained or (short and not small)):
            return cls(crop=True, flip=flip is not False, rand_augment=False)
        if name == "auto":
            name = "light" if small else "standard"
        standard = name == "standard"
        return cls(
            crop=name != "none", flip=standard if flip is None else flip, rand_augment=standard
        )

    def __call__(
        self, images_BCHW: Tensor, generator: Generator, part: BatchPart | None = None
    ) -> Tensor:
        """Return changed copies. The generator is on the CPU, whatever the device of the images.

        The images may be a part of a batch: each is changed as if the whole batch was there.
        """
        if not (self.crop or self.flip or self.rand_augment):
            return images_BCHW
        draws = Draws(part or BatchPart.of(len(images_BCHW)), images_BCHW.device, generator)
        affine = torch.eye(3, device=images_BCHW.device).expand(draws.count, 3, 3)
        if self.crop:
            affine = _crop(draws, size=images_BCHW.shape[-1]) @ affine
        if self.flip:
            affine = _flip(draws) @ affine
        if not self.rand_augment:
            return _resampled(images_BCHW, affine)
        rounds = [_Round.draw(draws) for _ in range(_OPERATIONS_PER_IMAGE)]
        for operation in rounds:
            affine = operation.affine() @ affine
        images = _resampled(images_BCHW, affine)
        for operation in rounds:
            images = operation.recolour(images)
        return images


class Draws:
    """Random numbers for a batch, one for each image."""

    def __init__(self, part: BatchPart, device: torch.device, generator: Generator) -> None:
        self._part, self._device, self._generator = part, device, generator
        self.count = max(1, part.images)

    def uniform(self) -> Tensor:
        return self._of_part(torch.rand(self._part.whole, generator=self._generator))

    def normal(self) -> Tensor:
        return self._of_part(torch.randn(self._part.whole, generator=self._generator))

    def sign(self) -> Tensor:
        return torch.where(self.uniform() < 0.5, -1.0, 1.0)

    def below(self, limit: int) -> Tensor:
        return self._of_part(torch.randint(limit, (self._part.whole,), generator=self._generator))

    def _of_part(self, drawn: Tensor) -> Tensor:
        return drawn[self._part.rows].to(self._device)


def _crop(draws: Draws, *, size: int) -> Tensor:
    """Draw a window of the padded image, at whole pixels."""
    padding = max(1, round(size * _PADDING_SHARE))
    step = 2 / size  # of a pixel, where an image reaches from -1 to 1
    x, y = ((draws.below(2 * padding + 1) - padding) * step for _ in range(2))
    return _affine(draws.count, x.device, shift_x=x, shift_y=y)


def _flip(draws: Draws) -> Tensor:
    return _affine(draws.count, draws.uniform().device, scale_x=draws.sign())


def _affine(count: int, device: torch.device, **parts: Tensor) -> Tensor:
    """Make matrices [B, 3, 3]: the identity but for the named parts."""
    matrix = torch.eye(3, device=device).repeat(count, 1, 1)
    places = {
        "scale_x": (0, 0),
        "shear_x": (0, 1),
        "shift_x": (0, 2),
        "shear_y": (1, 0),
        "scale_y": (1, 1),
        "shift_y": (1, 2),
    }
    for name, values in parts.items():
        row, column = places[name]
        matrix[:, row, column] = values
    return matrix


def _resampled(images_BCHW: Tensor, affine_B33: Tensor) -> Tensor:
    """Resample once for all affine changes; pixels from outside the image are black."""
    grid = F.affine_grid(affine_B33[:, :2], list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW, grid, mode="bilinear", align_corners=False)


_Affine = Callable[[Tensor], Tensor]
_Recolour = Callable[[Tensor, Tensor], Tensor]


def _rotate(strength_B: Tensor) -> Tensor:
    angle = strength_B * _MAX_ROTATION
    return _affine(
        len(angle),
        angle.device,
        scale_x=angle.cos(),
        shear_x=-angle.sin(),
        shear_y=angle.sin(),
        scale_y=angle.cos(),
    )


def _one_part(name: str, most: float) -> _Affine:
    def affine(strength_B: Tensor) -> Tensor:
        return _affine(len(strength_B), strength_B.device, **{name: strength_B * most})

    return affine


AFFINES: tuple[_Affine, ...] = (
    _rotate,
    _one_part("shear_x", _MAX_SHEAR),
    _one_part("shear_y", _MAX_SHEAR),
    _one_part("shift_x", 2 * _MAX_SHIFT),
    _one_part("shift_y", 2 * _MAX_SHIFT),
)


def _per_image(strength_B: Tensor) -> Tensor:
    return strength_B[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor((0.299, 0.587, 0.114), device=images.device)
    return (images * weights[:, None, None]).sum(dim=1, keepdim=True)


def _blend(images: Tensor, towards: Tensor, strength_B: Tensor) -> Tensor:
    """Blend with `towards`: strength -1 is all of it, and 1 is as far away from it."""
    return (images + _per_image(strength_B) * (images - towards)).clamp(0, 1)


def _brightness(images: Tensor, strength_B: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), strength_B)


def _contrast(images: Tensor, strength_B: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean(dim=(2, 3), keepdim=True), strength_B)


def _colour(images: Tensor, strength_B: Tensor) -> Tensor:
    return _blend(images, _grey(images), strength_B)


def _sharpness(images: Tensor, strength_B: Tensor) -> Tensor:
    smooth = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return _blend(images, smooth, strength_B)


def _posterise(images: Tensor, strength_B: Tensor) -> Tensor:
    levels = _per_image(2 ** (8 - (strength_B.abs() * 4).round()))
    return (images * 255 / (256 / levels)).floor() * (256 / levels) / 255


def _solarise(images: Tensor, strength_B: Tensor) -> Tensor:
    return torch.where(images < _per_image(1 - strength_B.abs()), images, 1 - images)


def _invert(images: Tensor, strength_B: Tensor) -> Tensor:
    return 1 - images


def _auto_contrast(images: Tensor, strength_B: Tensor) -> Tensor:
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-6), images)


RECOLOURS: tuple[_Recolour, ...] = (
    _brightness,
    _contrast,
    _colour,
    _sharpness,
    _posterise,
    _solarise,
    _invert,
    _auto_contrast,
)


@dataclass(frozen=True, slots=True)
class _Round:
    """One drawn operation for each image: an index into AFFINES + RECOLOURS (past both: none)."""

    operation_B: Tensor
    strength_B: Tensor

    @classmethod
    def draw(cls, draws: Draws) -> _Round:
        operations = len(AFFINES) + len(RECOLOURS)
        operation = draws.below(operations)
        operation = torch.where(draws.uniform() < CHANCE, operation, operations)
        strength = (_MAGNITUDE + _MAGNITUDE_STD * draws.normal()).clamp(0, 1) * draws.sign()
        return cls(operation, strength)

    def affine(self) -> Tensor:
        count, device = len(self.strength_B), self.strength_B.device
        matrix = torch.eye(3, device=device).repeat(count, 1, 1)
        for index, affine in enumerate(AFFINES):
            chosen = (self.operation_B == index)[:, None, None]
            matrix = torch.where(chosen, affine(self.strength_B), matrix)
        return matrix

    def recolour(self, images_BCHW: Tensor) -> Tensor:
        images = images_BCHW.clone()
        for index, recolour in enumerate(RECOLOURS, start=len(AFFINES)):
            rows = (self.operation_B == index).nonzero().squeeze(1)
            if len(rows):
                images[rows] = recolour(images[rows], self.strength_B[rows])
        return images


_GENTLE_SHIFT = 0.2
"""A tenth of the image's side, in which the image reaches from -1 to 1."""
SCALES = (0.8, 1.15)
_GENTLE_ROTATION = math.radians(10)
_CONTRASTS = (0.8, 1.25)
_MAX_BRIGHTNESS = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class GentleChanges:
    """Shift, scale, rotation, brightness and contrast; mirroring only where it is allowed."""

    flip: bool

    def __call__(
        self, images_BCHW: Tensor, generator: Generator, part: BatchPart | None = None
    ) -> Tensor:
        """Return changed copies, as `Augmentation` does."""
        draws = Draws(part or BatchPart.of(len(images_BCHW)), images_BCHW.device, generator)
        grid = F.affine_grid(self._affine(draws), list(images_BCHW.shape), align_corners=False)
        moved = F.grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)
        mean = moved.mean(dim=(1, 2, 3), keepdim=True)
        contrast, brightness = _between(draws, *_CONTRASTS), _around_0(draws, _MAX_BRIGHTNESS)
        recoloured = (moved - mean) * contrast[:, None, None, None]
        return (recoloured + mean + brightness[:, None, None, None]).clamp(0, 1)

    def _affine(self, draws: Draws) -> Tensor:
        angle, scale = _around_0(draws, _GENTLE_ROTATION), _between(draws, *SCALES)
        mirror = draws.sign() if self.flip else torch.ones_like(angle)
        cos, sin = scale * angle.cos(), scale * angle.sin()
        across, down = (_around_0(draws, _GENTLE_SHIFT) for _ in range(2))
        return torch.stack(
            (
                torch.stack((mirror * cos, -sin, across), dim=-1),
                torch.stack((mirror * sin, cos, down), dim=-1),
            ),
            dim=1,
        )


def _between(draws: Draws, low: float, high: float) -> Tensor:
    return low + (high - low) * draws.uniform()


def _around_0(draws: Draws, most: float) -> Tensor:
    return _between(draws, -most, most)
