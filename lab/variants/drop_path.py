"""Drop branches of a block at random while an expert learns (stochastic depth)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn


class Draws(nn.Module):
    """Give a generator of random numbers for each step, seeded by a counter.

    The counter is a buffer, so that a run that goes on from a checkpoint draws the same numbers
    as without an interruption.
    """

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._seed = int(torch.randint(1 << 40, ()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def generator(self) -> Generator:
        self.count += 1
        return Generator().manual_seed(self._seed + int(self.count))


class DropPath(nn.Module):
    """Drop a branch for some images of a batch, and scale it up for the others."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.draws = share, Draws()

    def forward(self, branch_BPC: Tensor) -> Tensor:
        if not self.training:
            return branch_BPC
        kept_B = torch.rand(len(branch_BPC), generator=self.draws.generator()) >= self.share
        return branch_BPC * (kept_B.to(branch_BPC) / (1 - self.share))[:, None, None]
