"""Compute functions of many images in batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.records.manifest import Preprocessing
from trainer.learning.fit import normalisation_on

BATCH = 500


def over_batches(
    pixels_NHWC: NDArray[np.uint8],
    function: Callable[[Tensor], Tensor],
    *,
    preprocessing: Preprocessing,
) -> NDArray[np.float32]:
    """Compute a function of normalised images in batches, without gradients."""
    normalisation = normalisation_on(torch.device("cpu"), preprocessing)
    parts = []
    with torch.no_grad():
        for begin in range(0, len(pixels_NHWC), BATCH):
            batch = torch.from_numpy(pixels_NHWC[begin : begin + BATCH]).permute(0, 3, 1, 2)
            parts.append(function(normalisation.standardise(normalisation.scale(batch.float()))))
    return torch.cat(parts).numpy()
