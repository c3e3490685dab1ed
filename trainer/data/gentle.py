"""Change training images a little, as a camera held differently would: all weights may learn from
them without unlearning what a class looks like.

Shift, scale and rotation are one resampling that repeats the border; brightness and contrast
follow. Images are float, 0 to 1, [B, 3, H, W].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from trainer.data.augment import Draws
from trainer.ranks.ranks import Part

MAX_SHIFT = 0.2
"""A tenth of the image's side, in which the image reaches from -1 to 1."""
SCALES = (0.8, 1.15)
MAX_ROTATION = math.radians(10)
CONTRASTS = (0.8, 1.25)
MAX_BRIGHTNESS = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class GentleChanges:
    """Shift, scale, rotation, brightness and contrast; mirroring only where it is allowed."""

    flip: bool

    def __call__(
        self, images_BCHW: Tensor, generator: Generator, part: Part | None = None
    ) -> Tensor:
        """Return changed copies, as `Augmentation` does."""
        draws = Draws(part or Part.of(len(images_BCHW)), images_BCHW.device, generator)
        grid = F.affine_grid(self._affine(draws), list(images_BCHW.shape), align_corners=False)
        moved = F.grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)
        mean = moved.mean(dim=(1, 2, 3), keepdim=True)
        contrast, brightness = _between(draws, *CONTRASTS), _around_0(draws, MAX_BRIGHTNESS)
        recoloured = (moved - mean) * contrast[:, None, None, None]
        return (recoloured + mean + brightness[:, None, None, None]).clamp(0, 1)

    def _affine(self, draws: Draws) -> Tensor:
        angle, scale = _around_0(draws, MAX_ROTATION), _between(draws, *SCALES)
        mirror = draws.sign() if self.flip else torch.ones_like(angle)
        cos, sin = scale * angle.cos(), scale * angle.sin()
        across, down = (_around_0(draws, MAX_SHIFT) for _ in range(2))
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
