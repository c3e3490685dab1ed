"""Products with weights, in the precision that the weights are kept in.

Where that is less than the precision of what they are multiplied with, this is rounded on its way
in, and the product on its way out; nothing else is. Sums within a product are torch's, in 32 bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Multiply(Protocol):
    """x · weight, into `out`."""

    def __call__(self, x: Tensor, weight: Tensor, /, *, out: Tensor) -> Tensor: ...


def multiplying(x: Tensor, weight: Tensor) -> Multiply:
    """How products of such types are made. Asked once for the many small ones of a layer."""
    return torch.mm if weight.dtype == x.dtype else _multiply_rounded


def multiply_plus(bias: Tensor, x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """x · weight + bias"""
    if weight.dtype == x.dtype:
        torch.addmm(bias, x, weight, out=out)
    else:
        torch.add(torch.mm(x.to(weight.dtype), weight), bias, out=out)


def multiply_onto(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds x · weight to `total`."""
    if weight.dtype == x.dtype:
        total.addmm_(x, weight)
    else:
        total.add_(torch.mm(x.to(weight.dtype), weight))


def multiply_each(x: Tensor, weight: Tensor) -> Tensor:
    """x · weight for each expert."""
    if weight.dtype == x.dtype:
        return torch.bmm(x, weight)
    return torch.bmm(x.to(weight.dtype), weight).to(x.dtype)


def multiply_each_plus(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """x · weight + total for each expert."""
    if weight.dtype == x.dtype:
        return torch.baddbmm(total, x, weight)
    return total + torch.bmm(x.to(weight.dtype), weight)


def _multiply_rounded(x: Tensor, weight: Tensor, /, *, out: Tensor) -> Tensor:
    return out.copy_(torch.mm(x.to(weight.dtype), weight))
