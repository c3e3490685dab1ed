"""Compute the spatial attention of several experts of equal shape in the same products.

Shapes: S experts of a run, B images, P positions, N = B·P, C channels of an expert, X = 3C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.network.backbone import turn


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedPlaces:
    """The `FoldedPlaces` of S experts."""

    weights_SHPP: Tensor
    content_SH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The `FoldedTurn` of a backbone, with the `turns` of all its rows."""

    key_bias_C: Tensor
    norms: tuple[Tensor, ...]
    turns: tuple[Tensor, ...]

    def __call__(self, q_BHPD: Tensor, k_BHPD: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """Normalise and turn queries and keys of all rows."""
        if self.norms:
            shape, (q_weight, q_bias, k_weight, k_bias) = q_BHPD.shape[-1:], self.norms
            q_BHPD = F.layer_norm(q_BHPD, shape, q_weight, q_bias, eps)
            k_BHPD = F.layer_norm(k_BHPD, shape, k_weight, k_bias, eps)
        if self.turns:
            q_BHPD, k_BHPD = turn(q_BHPD, *self.turns), turn(k_BHPD, *self.turns)
        return q_BHPD, k_BHPD


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedAttention:
    """The `FoldedAttention` of S experts."""

    heads: int
    qkv_SCX: Tensor
    query_bias_SC: Tensor
    out_SCC: Tensor
    out_bias_SC: Tensor
    places: StackedPlaces | None
    turn: Turn | None = None


def attend(
    x_SBPC: Tensor, attention: StackedAttention, *, eps: float, queries: int | None = None
) -> Tensor:
    """Add the output of attention among the positions of each expert to every position.

    With `queries` only the first positions are computed; gated attention computes all.
    """
    experts, batch, positions, width = x_SBPC.shape
    normed_SNC = F.layer_norm(x_SBPC, (width,), eps=eps).flatten(1, 2)
    qkv_SNX = multiply_each(normed_SNC, attention.qkv_SCX)
    qkv_SNX[..., :width].add_(attention.query_bias_SC[:, None])
    qkv = qkv_SNX.view(experts * batch, positions, 3, attention.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if attention.turn is not None:
        qkv_SNX[..., width : 2 * width].add_(attention.turn.key_bias_C)
        q, k = attention.turn(q, k, eps=eps)
    rows = queries or positions
    mixed = F.scaled_dot_product_attention(q[:, :, :rows], k, v, scale=1.0)
    mixed_SBPHD = mixed.transpose(1, 2).view(experts, batch, rows, attention.heads, -1)
    if attention.places is not None:
        v_SBPHD = qkv_SNX.view(experts, batch, positions, 3, attention.heads, -1)[:, :, :, 2]
        mixed_SBPHD = _with_places(mixed_SBPHD, v_SBPHD, attention.places)
    mixed_SNC = mixed_SBPHD.reshape(experts, batch * rows, width)
    x_SBPC = x_SBPC[:, :, :rows]
    x_SNC = x_SBPC.flatten(1, 2).add_(attention.out_bias_SC[:, None])
    return multiply_each_plus(x_SNC, mixed_SNC, attention.out_SCC).view(x_SBPC.shape)


def _with_places(content_SBPHD: Tensor, v_SBPHD: Tensor, places: StackedPlaces) -> Tensor:
    """Mix what the content gave with what the places give: one product a head for all images."""
    experts, batch, positions, heads, width = v_SBPHD.shape
    v = v_SBPHD.permute(0, 3, 2, 1, 4).reshape(experts * heads, positions, batch * width)
    placed = torch.bmm(places.weights_SHPP.flatten(0, 1), v)
    placed_SBPHD = placed.view(experts, heads, positions, batch, width).permute(0, 3, 2, 1, 4)
    return torch.addcmul(placed_SBPHD, content_SBPHD, places.content_SH[:, None, None, :, None])


def attend_first(x_SBPC: Tensor, attention: StackedAttention, *, eps: float) -> Tensor:
    """Add the output of attention to the first position alone, the token: [S, B, 1, C].

    A single query needs neither keys nor values of the positions. Each head h projects its query
    instead, and reads the normalised positions n_p as they are::

                plain attention                         here
        score   q · (W_k n_p)                           (W_kᵀ q) · n_p
        read    Σ_p a_p (W_v n_p)                       W_v (Σ_p a_p n_p)
        cost    2·P products of C×C and a vector        2 products of C×C and a vector

    Example of 3 experts, 2 images, 5 positions, 8 channels in 2 attention heads of 4 channels::

        n_p                     normed_SBPC   [3, 2, 5, 8]
        q        token only     query         [3·2, 2, 4]       a matrix for each expert and head
        W_kᵀ q   × [3·2, 4, 8]  projected     [3, 2, 2, 8]      expert, image, head, channel
        a        × n_p, softmax weights       [3, 2, 2, 5]      one weight a position
        Σ a n_p  × n_p          read          [3·2, 2, 8]
        W_v …    × [3·2, 8, 4]  mixed         [3, 2, 2, 4]      expert, head, image, channel
        heads side by side      mixed_SBC     [3, 2, 8]         then the output projection
    """
    if attention.turn is not None:  # a turned key cannot be left unprojected
        return attend(x_SBPC, attention, eps=eps, queries=1)
    normed_SBPC = F.layer_norm(x_SBPC, x_SBPC.shape[-1:], eps=eps)
    query_SCC = attention.qkv_SCX[..., : x_SBPC.shape[-1]]
    query_SBC = torch.baddbmm(attention.query_bias_SC[:, None], normed_SBPC[:, :, 0], query_SCC)
    mixed_SBC = _read_by(query_SBC, normed_SBPC, attention)
    x_SBC = x_SBPC[:, :, 0] + attention.out_bias_SC[:, None]
    return torch.baddbmm(x_SBC, mixed_SBC, attention.out_SCC)[:, :, None]


def attend_pooled(patches_SBPC: Tensor, attention: StackedAttention, *, eps: float) -> Tensor:
    """Answer a query that is the same for all images from the patches: [S, B, 1, C]."""
    normed_SBPC = F.layer_norm(patches_SBPC, patches_SBPC.shape[-1:], eps=eps)
    shape = (*patches_SBPC.shape[:2], patches_SBPC.shape[-1])
    query_SBC = attention.query_bias_SC[:, None].expand(shape)
    mixed_SBC = _read_by(query_SBC, normed_SBPC, attention)
    return torch.baddbmm(attention.out_bias_SC[:, None], mixed_SBC, attention.out_SCC)[:, :, None]


def _read_by(query_SBC: Tensor, normed_SBPC: Tensor, attention: StackedAttention) -> Tensor:
    """Read the positions by one query an image: [S, B, C], as `attend_first` explains."""
    experts, batch, _, width = normed_SBPC.shape
    heads, by_head = attention.heads, (experts, width, attention.heads, -1)
    _, key_SCC, value_SCC = attention.qkv_SCX.chunk(3, dim=-1)
    query = query_SBC.view(experts, batch, heads, -1).transpose(1, 2).flatten(0, 1)
    key = key_SCC.view(by_head).permute(0, 2, 3, 1).flatten(0, 1)
    projected = torch.bmm(query, key).view(experts, heads, batch, width).transpose(1, 2)
    weights = torch.softmax(projected @ normed_SBPC.transpose(-1, -2), dim=-1)
    read = (weights @ normed_SBPC).transpose(1, 2).reshape(-1, batch, width)
    value = value_SCC.view(by_head).transpose(1, 2).flatten(0, 1)
    mixed = torch.bmm(read, value).view(experts, heads, batch, -1)
    return mixed.transpose(1, 2).reshape(query_SBC.shape)
