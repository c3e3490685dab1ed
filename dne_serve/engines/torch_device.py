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
    """The passes of one version on a device."""

    def __call__(self, pixels: Pixels) -> Tensor:
        """Compute the token [N, channels of all experts] of images [N, S, S, 3], on the device.
        The token is valid until the next pass of any version."""

    def prepare(self) -> Iterator[None]:
        """Prepare, in steps, so that the first batch is as fast as the next."""

    def renew(self) -> Iterator[None]:
        """Prepare again, in steps, if the memory of the experts has moved."""


class Device(Protocol):
    place: torch.device

    def passes(self, lineage: Lineage, *, preprocessing: Preprocessing) -> Passes: ...

    def fetch(self, found: Tensor) -> Floats:
        """Wait for a result and copy it to ordinary memory."""


class Cpu:
    """The processor: images need no copying, and a pass is a call."""

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
        """Do nothing: a call finds the memory at any place."""
        return iter(())
