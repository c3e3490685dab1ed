"""Define a device: copy images in, run a pass over them, copy the answers out.

One thread uses a device, as one thread uses the torch engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.preprocess import Pixels, normalise
from model_store.records.manifest import Preprocessing

Floats = NDArray[np.float32]


class Passes(Protocol):
    """How a version is run on a device. Lives and goes with the version."""

    def __call__(self, pixels: Pixels) -> Tensor:
        """The token [N, channels of all experts] of images [N, S, S, 3], on the device. It is
        there until the next pass, of whichever version."""

    def prepare(self) -> Iterator[None]:
        """Makes the first batch as fast as the next, in steps."""

    def renew(self) -> Iterator[None]:
        """Prepares again, in steps, where the memory of the experts has moved meanwhile."""


class Device(Protocol):
    place: torch.device

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes: ...

    def fetch(self, found: Tensor) -> Floats:
        """What was computed, in ordinary memory, after it was computed."""


class Cpu:
    """Images are where they are needed, and a pass is a call."""

    def __init__(self, *, max_batch: int) -> None:
        self.place = torch.device("cpu")
        self._max_batch = max_batch

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes:
        return CpuPasses(lineage, preprocessing=preprocessing, max_batch=self._max_batch)

    def fetch(self, found: Tensor) -> Floats:
        answers: Floats = found.numpy()
        return answers


@dataclass(frozen=True, slots=True)
class CpuPasses:
    lineage: Lineage
    preprocessing: Preprocessing
    max_batch: int

    def __call__(self, pixels: Pixels) -> Tensor:
        return self.lineage.token(torch.from_numpy(normalise(pixels, self.preprocessing)))

    def prepare(self) -> Iterator[None]:
        self.lineage.reserve(self.max_batch)
        yield

    def renew(self) -> Iterator[None]:
        """A call finds the memory wherever it is."""
        return iter(())
