"""Layers and blocks of vision transformers, in plain torch functions that know no other code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, HEADS, DEPTH, PATCH = 64, 2, 2, 4

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def drawn(shapes: Shapes, *, seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def linear_shapes(name: str, written: int, read: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (written, read)}
    return {**shapes, f"{name}.bias": (written,)} if bias else shapes


def norm_shapes(*names: str, width: int = WIDTH) -> Shapes:
    return {f"{name}.{part}": (width,) for name in names for part in ("weight", "bias")}


def linear(t: Tensors, x: Tensor, *names: str) -> Tensor:
    """Several layers side by side, each with the bias that it has."""
    return torch.cat(
        [F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")) for name in names], dim=-1
    )


def norm(t: Tensors, x: Tensor, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)


def patches(t: Tensors, images: Tensor, name: str) -> Tensor:
    grid = F.conv2d(images, t[f"{name}.weight"], t.get(f"{name}.bias"), stride=PATCH)
    return grid.flatten(2).transpose(1, 2)


def attention(
    qkv: Tensor, *, heads: int = HEADS, turn: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in qkv.chunk(3, dim=-1))
    q, k = turn(q), turn(k)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    read: Tensor = (weights @ v).transpose(1, 2).flatten(2)
    return read


def before(x: Tensor, *tokens: Tensor) -> Tensor:
    return torch.cat([*(one.reshape(1, -1, WIDTH).expand(len(x), -1, -1) for one in tokens), x], 1)


def beside(normed: Tensor, *, before: int = 1) -> Tensor:
    """The class token, and the mean of the patches, which stand after `before` other rows."""
    return torch.cat((normed[:, 0], normed[:, before:].mean(dim=1)), dim=-1)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The names of a library's blocks, and how they compute."""

    here: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    widen: tuple[str, ...]
    narrow: str
    scales: tuple[str, ...] = ()
    inner: str = ""
    """A norm inside the hidden layer."""
    biased: tuple[bool, ...] = (True, True, True)
    hidden: int = 128
    activate: Callable[[Tensor], Tensor] = F.gelu
    eps: float = 1e-6

    def shapes(self) -> Shapes:
        shapes: Shapes = {}
        gated = 2 if self.activate is swiglu else 1
        for b in (self.here.format(number) for number in range(DEPTH)):
            shapes |= norm_shapes(*(f"{b}{name}" for name in self.norms))
            for name, bias in zip(self.qkv, self.biased, strict=False):
                wide = 3 * WIDTH // len(self.qkv)
                shapes |= linear_shapes(f"{b}{name}", wide, WIDTH, bias=bias)
            shapes |= linear_shapes(f"{b}{self.out}", WIDTH, WIDTH)
            for name in self.widen:
                wide = gated * self.hidden // len(self.widen)
                shapes |= linear_shapes(f"{b}{name}", wide, WIDTH)
            shapes |= linear_shapes(f"{b}{self.narrow}", WIDTH, self.hidden)
            shapes |= {f"{b}{name}": (WIDTH,) for name in self.scales}
            if self.inner:
                shapes |= norm_shapes(f"{b}{self.inner}", width=self.hidden)
        return shapes

    def __call__(
        self, t: Tensors, x: Tensor, *, turn: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        for b in (self.here.format(number) for number in range(DEPTH)):
            gammas = [t[f"{b}{name}"] for name in self.scales] or [torch.ones(1)] * 2
            normed = norm(t, x, f"{b}{self.norms[0]}", self.eps)
            qkv = linear(t, normed, *(f"{b}{name}" for name in self.qkv))
            for part in ("q", "v"):  # EVA-02 adds the biases of queries and values apart
                if f"{b}attn.{part}_bias" in t:
                    place = 0 if part == "q" else 2 * WIDTH
                    bias = t[f"{b}attn.{part}_bias"]
                    qkv = qkv + F.pad(bias, (place, 2 * WIDTH - place))
            x = x + gammas[0] * linear(t, attention(qkv, turn=turn), f"{b}{self.out}")
            normed = norm(t, x, f"{b}{self.norms[1]}", self.eps)
            hidden = self.activate(linear(t, normed, *(f"{b}{name}" for name in self.widen)))
            if self.inner:
                hidden = norm(t, hidden, f"{b}{self.inner}", self.eps)
            x = x + gammas[1] * linear(t, hidden, f"{b}{self.narrow}")
        return x


def swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * value


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def embedding(name: str, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (WIDTH, 3, PATCH, PATCH)}
    return {**shapes, f"{name}.bias": (WIDTH,)} if bias else shapes
