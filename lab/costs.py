"""Count the operations of an answer, by running it on one image."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lab.method import Method


def count_flop(method: Method, *, image_size: int) -> int:
    """Count the products of matrices and the convolutions; a multiply-add counts as two."""
    # The counter does not know the fused attention of a CPU, but knows the products it stands for.
    unfused = sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), unfused, FlopCounterMode(display=False) as counter:
        method.scores(torch.zeros(1, 3, image_size, image_size))
    return int(counter.get_total_flops())
