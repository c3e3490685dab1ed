"""Drop branches of a block at random while an expert learns (stochastic depth)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn


class DropPath(nn.Module):
    """Drop a branch for some images of a batch, and scale it up for the others.

    The random numbers follow from a counter. The counter is a buffer, so that a run that goes on
    from a checkpoint draws the same numbers as without an interruption.
    """

    draws: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self._seed = int(torch.randint(1 << 40, ())) if share else 0
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, branch_BPC: Tensor) -> Tensor:
        if not self.training or not self.share:
            return branch_BPC
        self.draws += 1
        generator = Generator().manual_seed(self._seed + int(self.draws))
        kept_B = torch.rand(len(branch_BPC), generator=generator) >= self.share
        return branch_BPC * (kept_B.to(branch_BPC) / (1 - self.share))[:, None, None]
