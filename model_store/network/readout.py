"""Read features of earlier blocks for the slice of a pre-trained first expert (`spec.Readout`).

Every feature is a mean of rows, so a block is read by one product with a matrix of shares.

Example of 2 images, a token and 4 × 4 patches of 8 channels, and a grid of 3 × 3 cells::

    rows_BPC     [2, 17, 8]     the output of a block, each row normalised
    shares_RP    [11, 17]       token, mean of all patches, 9 cells
    read         [2, 11 · 8]    the 11 rows side by side

Shapes: B images, P positions, C channels of the first expert, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_store.spec import NetworkSpec


def shares_of(spec: NetworkSpec) -> dict[int, Tensor]:
    """Return the matrix of shares [R, P] of each block that is read, by its number from 1."""
    blocks = spec.readout.blocks if spec.readout else ()
    return {block: _shares(spec, block) for block in blocks}


def read_rows(rows_BPC: Tensor, shares_RP: Tensor, *, eps: float) -> Tensor:
    """Normalise the output rows of a block without scale and bias, and read them: [B, R·C]."""
    normed_BPC = F.layer_norm(rows_BPC, rows_BPC.shape[-1:], eps=eps)
    return torch.matmul(shares_RP, normed_BPC).flatten(1)


class ReadoutOf(nn.Module):
    """Read the earlier blocks that a spec names. No tensor of it is in a shard."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self._eps = spec.layer_norm_eps
        self._names: Mapping[int, str] = {}
        for block, shares_RP in shares_of(spec).items():
            self._names = {**self._names, block: f"shares_{block}"}
            self.register_buffer(f"shares_{block}", shares_RP, persistent=False)

    def read(self, block: int, rows_BPC: Tensor) -> list[Tensor]:
        """Read the output of a block; nothing if the spec does not name the block."""
        if block not in self._names:
            return []
        return [read_rows(rows_BPC, self.get_buffer(self._names[block]), eps=self._eps)]


def _shares(spec: NetworkSpec, block: int) -> Tensor:
    """Return [R, P]: the token if it is in the sequence, the mean of patches, perhaps cells."""
    assert spec.readout is not None
    side, before = spec.image_size // spec.patch_size, int(spec.token == "in-sequence")
    cells = spec.readout.grid if spec.readout.cells_of(block) else 0
    rows = [torch.full((spec.patches,), 1 / spec.patches)]
    for down in range(cells):
        for along in range(cells):
            inside = torch.zeros(side, side)
            inside[_span(down, cells, side), _span(along, cells, side)] = 1
            rows.append((inside / inside.sum()).flatten())
    after = spec.positions_of(0) - spec.positions
    shares_RP = F.pad(torch.stack(rows), (before, after))
    if before:
        token_1P = torch.eye(1, shares_RP.shape[1])
        shares_RP = torch.cat((token_1P, shares_RP))
    return shares_RP


def _span(cell: int, cells: int, side: int) -> slice:
    """Return the patches of a cell on one side; neighbouring cells may share one."""
    return slice(cell * side // cells, -(-(cell + 1) * side // cells))
