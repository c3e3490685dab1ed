"""Estimate from the token how likely an image is of none of the classes. See ADR 53.

The oldest expert's slice of the token is shifted, L2-normalised and whitened: z. The log-odds that
the image is of one of the classes are the largest of z · prototype + offset, less |z|² / 2. Both
backends compute this in numpy: it takes a few thousandths of a pass.

N images, W channels of the slice, Y classes that are answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LEAST_NORM = 1e-6
"""The least length that a token is divided by: a token of zeros stays one."""
FAR = 700.0
"""Log-odds whose exponential is still finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Doubt:
    """The tensors of a doubt shard, for the classes that a version answers."""

    shift_W: Floats
    project_WW: Floats
    bias_W: Floats
    prototypes_YW: Floats
    offsets_Y: Floats

    @classmethod
    def of(cls, tensors: Mapping[str, Floats], *, places: Sequence[int]) -> Doubt:
        """Take the rows of the answered classes: a retired class makes no image known."""
        rows = list(places)
        return cls(
            shift_W=tensors["doubt.shift"],
            project_WW=tensors["doubt.project"],
            bias_W=tensors["doubt.bias"],
            prototypes_YW=tensors["doubt.prototypes"][rows],
            offsets_Y=tensors["doubt.offsets"][rows],
        )

    def arrays(self) -> dict[str, Floats]:
        """Give the tensors by the names of an exported graph."""
        return {
            "shift": self.shift_W,
            "project": self.project_WW,
            "bias": self.bias_W,
            "prototypes": np.ascontiguousarray(self.prototypes_YW.T),
            "offsets": self.offsets_Y,
        }

    @property
    def width(self) -> int:
        return len(self.shift_W)

    def log_odds(self, token_NC: Floats) -> Floats:
        """Score tokens of this lineage, or of a longer one: [N], higher for known images."""
        moved_NW = token_NC[:, : self.width] - self.shift_W
        length_N1 = np.sqrt(np.einsum("nw,nw->n", moved_NW, moved_NW))[:, None]
        unit_NW = moved_NW / np.maximum(length_N1, LEAST_NORM)
        # Not `@`: the library behind it begins threads of its own beside those of the engine.
        z_NW = np.einsum("nw,wv->nv", unit_NW, self.project_WW) + self.bias_W
        like_NY = np.einsum("nw,yw->ny", z_NW, self.prototypes_YW) + self.offsets_Y
        away_N = np.einsum("nw,nw->n", z_NW, z_NW) / 2
        return np.asarray(like_NY.max(axis=1) - away_N, dtype=np.float32)


def none_of_these(log_odds: float) -> float:
    """Turn log-odds into the probability that an image is of none of the classes."""
    return 1 / (1 + math.exp(min(log_odds, FAR)))
