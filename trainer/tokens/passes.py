"""Pass images through a network in batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.network.network import Network
from model_store.preprocess import normalise
from model_store.records.manifest import Preprocessing

BATCH = 16
"""Images in a pass: more are hardly faster on a processor, and a bar would stand still."""

Floats = NDArray[np.float32]


def in_batches(
    network: Network,
    pixels_NHWC: NDArray[np.uint8],
    read: Callable[[Tensor], Tensor],
    *,
    preprocessing: Preprocessing,
    batch_size: int = BATCH,
    advance: Callable[[int], None] | None = None,
) -> Floats:
    """Apply `read` to all images in batches, without gradients: one row an image.

    `advance` is told the size of each batch that is done.
    """
    rows = []
    with torch.inference_mode():
        for start in range(0, len(pixels_NHWC), batch_size):
            batch = normalise(pixels_NHWC[start : start + batch_size], preprocessing)
            rows.append(read(torch.from_numpy(batch).to(network.device)).cpu().numpy())
            if advance is not None:
                advance(len(batch))
    return np.concatenate(rows) if rows else np.zeros((0, 1), dtype=np.float32)
