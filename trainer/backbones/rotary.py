"""Compute the angles of rotary positions, which files do not have, for any number of patches.

Shapes: P patches, D channels of an attention head, R = D/2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EVA_SIDE = 16
"""Patches of a side in the pre-training of EVA-02, onto which other sizes are scaled."""
EVA_THETA = 10_000.0
DINOV3_THETA = 100.0


def dinov3_angles(*, patches: int, channels: int, theta: float) -> Tensor:
    """Give [P, R]: first those of rows, then those of columns; centres lie between −1 and 1."""
    side = math.isqrt(patches)
    centres = (torch.arange(side, dtype=torch.float32) + 0.5) / side * 2 - 1
    frequency = 1 / theta ** torch.arange(0, 1, 4 / channels, dtype=torch.float32)
    return _by_place(2 * math.pi * centres[:, None] * frequency)


def eva02_angles(*, patches: int, channels: int) -> Tensor:
    """Give [P, R]: places are counted from 0, on a grid of 16 patches a side."""
    side = math.isqrt(patches)
    places = torch.arange(side, dtype=torch.float32) / side * EVA_SIDE
    bands = channels // 4
    frequency = 1 / EVA_THETA ** (torch.arange(bands, dtype=torch.float32) / bands)
    return _by_place(places[:, None] * frequency)


def _by_place(along_SQ: Tensor) -> Tensor:
    """Join the angles of a patch's row and of its column."""
    side, bands = along_SQ.shape
    rows = along_SQ[:, None].expand(side, side, bands)
    columns = along_SQ[None].expand(side, side, bands)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)


def halves_of_pairs(rows: Tensor, *, heads: int) -> Tensor:
    """Reorder the channels of each head from neighbouring pairs (EVA-02) to halves, as ours are.

    Both queries and keys are reordered, so no product of a query and a key changes.
    """
    by_pair = rows.view(heads, -1, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)
