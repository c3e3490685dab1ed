"""Multiply with weights in the type that the weights are kept in (`matmul_dtype`).

If weights have fewer bits than their input, the input is rounded before the product, and the
product after it. Torch sums within a product in 32 bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Multiply(Protocol):
    """Write x · weight into `out`."""

    def __call__(self, x: Tensor, weight: Tensor, /, *, out: Tensor) -> Tensor: ...


def multiplying(x: Tensor, weight: Tensor) -> Multiply:
    """Choose the product for operands of these types, once for the many small ones of a layer."""
    return torch.mm if weight.dtype == x.dtype else _multiply_rounded


def multiply_plus(bias: Tensor, x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """Write x · weight + bias into `out`."""
    if weight.dtype == x.dtype:
        torch.addmm(bias, x, weight, out=out)
    else:
        torch.add(torch.mm(x.to(weight.dtype), weight), bias, out=out)


def multiply_onto(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x · weight to `total`."""
    if weight.dtype == x.dtype:
        total.addmm_(x, weight)
    else:
        total.add_(torch.mm(x.to(weight.dtype), weight))


def multiply_each(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x · weight for each expert."""
    if weight.dtype == x.dtype:
        return torch.bmm(x, weight)
    return torch.bmm(x.to(weight.dtype), weight).to(x.dtype)


def multiply_each_plus(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute x · weight + total for each expert."""
    if weight.dtype == x.dtype:
        return torch.baddbmm(total, x, weight)
    return total + torch.bmm(x.to(weight.dtype), weight)


def _multiply_rounded(x: Tensor, weight: Tensor, /, *, out: Tensor) -> Tensor:
    return out.copy_(torch.mm(x.to(weight.dtype), weight))
