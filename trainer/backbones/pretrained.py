"""Read a pre-trained vision transformer as the first expert.

Nothing in the file is trusted. Whatever can be multiplied into the weights is, so that the network
has to know as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.network.expert import Expert
from model_store.spec import ExpertSpec, NetworkSpec
from trainer.backbones.files import read_weight_file
from trainer.backbones.names import Family, recognise
from trainer.backbones.settings import Triple, read_settings
from trainer.backbones.shapes import (
    LAYERS,
    POOLING,
    READ_WIDTH,
    SCALED,
    attention_heads_of,
    customary_normalisation,
    expected_tensors,
    family_of,
    geometry_of,
    rows_before,
    width_of,
)

_EVA_SIDE = 16
"""Patches of a side in the pre-training of EVA-02, onto which other sizes are scaled."""
_EVA_THETA = 10_000.0
_DINOV3_THETA = 100.0


def _dinov3_angles(*, patches: int, channels: int, theta: float) -> Tensor:
    """Return [P, R]: first those of rows, then those of columns; centres lie between −1 and 1."""
    side = math.isqrt(patches)
    centres = (torch.arange(side, dtype=torch.float32) + 0.5) / side * 2 - 1
    frequency = 1 / theta ** torch.arange(0, 1, 4 / channels, dtype=torch.float32)
    return _by_place(2 * math.pi * centres[:, None] * frequency)


def _eva02_angles(*, patches: int, channels: int) -> Tensor:
    """Return [P, R]: places are counted from 0, on a grid of 16 patches a side."""
    side = math.isqrt(patches)
    places = torch.arange(side, dtype=torch.float32) / side * _EVA_SIDE
    bands = channels // 4
    frequency = 1 / _EVA_THETA ** (torch.arange(bands, dtype=torch.float32) / bands)
    return _by_place(places[:, None] * frequency)


def _by_place(along_SQ: Tensor) -> Tensor:
    """Join the angles of a patch's row and of its column."""
    side, bands = along_SQ.shape
    rows = along_SQ[:, None].expand(side, side, bands)
    columns = along_SQ[None].expand(side, side, bands)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)


def _halves_of_pairs(rows: Tensor, *, heads: int) -> Tensor:
    """Reorder the channels of each head from neighbouring pairs (EVA-02) to halves, as ours are.

    Both queries and keys are reordered, so no product of a query and a key changes.
    """
    by_pair = rows.view(heads, -1, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """The weights of a file by timm's names, and the network that they imply."""

    sha256: str
    tensors: Mapping[str, Tensor]
    geometry: NetworkSpec
    """The geometry that the file is used with unless another image size is asked; no tasks."""
    expert: ExpertSpec
    normalisation: tuple[Triple, Triple]
    """Mean and deviation, of the settings beside the file or by the custom of the family."""
    family: Family
    rope_theta: float = _DINOV3_THETA

    @property
    def width(self) -> int:
        return self.expert.heads * READ_WIDTH

    def load_into(self, expert: Expert, *, geometry: NetworkSpec) -> None:
        """Name the weights as the expert's parameters, for any image size, and load them."""
        state = dict(self._edges(geometry))
        for block in range(geometry.depth):
            state |= self._block(f"blocks.{block}.", LAYERS, f"blocks.{block}.")
        if geometry.first.pooling == "attention":
            state |= self._block("class_block.", POOLING, "")
        expert.load_state_dict(state)

    def _edges(self, geometry: NetworkSpec) -> Iterator[tuple[str, Tensor]]:
        kind, width = geometry.first, self.width
        yield "patch_embed.weight", self.tensors["patch_embed.proj.weight"]
        yield "patch_embed.bias", self.tensors.get("patch_embed.proj.bias", torch.zeros(width))
        token = self.tensors["attn_pool.latent" if kind.pooling == "attention" else "cls_token"]
        yield "token", token.flatten()
        yield "position", self._position(geometry)
        last = {"mean": "fc_norm", "attention": None}.get(kind.pooling, "norm")
        for ours, theirs in (("norm", last), ("pre_norm", "norm_pre" if kind.pre_norm else None)):
            if theirs is not None:
                yield f"{ours}.weight", self.tensors[f"{theirs}.weight"]
                yield f"{ours}.bias", self.tensors[f"{theirs}.bias"]
        if kind.rotary:
            patches, channels = geometry.patches, self.width // self.expert.attention_heads
            yield (
                "rotary.angles",
                (
                    _eva02_angles(patches=patches, channels=channels)
                    if self.family == "eva02"
                    else _dinov3_angles(patches=patches, channels=channels, theta=self.rope_theta)
                ),
            )

    def _position(self, geometry: NetworkSpec) -> Tensor:
        """Put the rows in our order: token, patches, registers; and resize those of patches."""
        others = [
            self.tensors[name].reshape(-1, self.width)
            for name in ("dist_token", "reg_token")
            if name in self.tensors
        ]
        in_sequence = int(geometry.token == "in-sequence")
        if "pos_embed" not in self.tensors:
            plain = torch.zeros(in_sequence + geometry.patches, self.width)
            return torch.cat((plain, *others))
        given = self.tensors["pos_embed"].reshape(-1, self.width)
        before = rows_before(len(given), in_sequence, sum(map(len, others)))
        if before is None:
            raise AssertionError("the number of positions is checked when a file is read")
        own, grid = given[:before], _resized(given[before:], patches=geometry.patches)
        extra = torch.cat((torch.zeros(0, self.width), *others))
        if before > 1:  # the positions of the token and of all others
            extra = extra + own[1:]
        token = own[:1] if before else torch.zeros(in_sequence, self.width)
        return torch.cat((token, grid, extra))

    def _block(self, ours: str, layers: Mapping[str, str], theirs: str) -> dict[str, Tensor]:
        state = {
            f"{layer}.{part}": self.tensors[f"{theirs}{name}.{part}"]
            for layer, name in layers.items()
            for part in ("weight", "bias")
            if f"{theirs}{name}.{part}" in self.tensors
        }
        if f"{theirs}mlp.norm.weight" in self.tensors:
            _fold_norm(state, "narrow", self.tensors, f"{theirs}mlp.norm")
        self._fill_up(state)
        for layer, scale in SCALED.items():
            _fold_scale(state, layer, self.tensors.get(f"{theirs}{scale}"))
        return {f"{ours}{name}": tensor for name, tensor in state.items()}

    def _fill_up(self, state: dict[str, Tensor]) -> None:
        """Give our shapes to a hidden layer of any width, and our order to turned channels.

        Zeros as weights of a hidden channel make it zero after every activation.
        """
        hidden = self.width * self.geometry.mlp_ratio
        missing = hidden - state["narrow.weight"].shape[1]
        if missing:
            state["narrow.weight"] = F.pad(state["narrow.weight"], (0, missing))
            parts = 2 if self.geometry.first.activation == "swiglu" else 1
            for name in ("widen.weight", "widen.bias"):
                by_part = state[name].view(parts, -1, *state[name].shape[1:])
                padding = (0, 0) * (by_part.dim() - 2) + (0, missing)
                state[name] = F.pad(by_part, padding).flatten(0, 1)
        if self.family == "eva02":
            for name in ("attention.qkv.weight", "attention.qkv.bias"):
                if name in state:
                    q, k, v = state[name].chunk(3)
                    heads = self.expert.attention_heads
                    q, k = (_halves_of_pairs(one, heads=heads) for one in (q, k))
                    state[name] = torch.cat((q, k, v))


def read_pretrained(path: Path, *, attention_heads: int | None = None) -> Pretrained:
    """Read a file. Raise DataRejected, which names the expected and the found, for any other."""
    file = read_weight_file(path)
    scheme, named, passed = recognise(file)
    settings = read_settings(path)
    family = family_of(scheme, named)
    width = width_of(named, settings)
    heads = attention_heads_of(path, width=width, asked=attention_heads, settings=settings)
    geometry = geometry_of(named, family, width, settings)
    expected = dict(expected_tensors(named, geometry, width=width, heads=heads, family=family))
    for name, shape in expected.items():
        named.expect(name, shape)
    named.refuse_others(read=set(expected), passed=passed)
    return Pretrained(
        sha256=file.sha256,
        tensors={name: named.tensor(name) for name in expected},
        geometry=geometry,
        expert=ExpertSpec(heads=width // READ_WIDTH, attention_heads=heads),
        normalisation=settings.normalisation or customary_normalisation(named, family),
        family=family,
        rope_theta=settings.rope_theta or _DINOV3_THETA,
    )


def _fold_scale(state: dict[str, Tensor], layer: str, scale_C: Tensor | None) -> None:
    """Multiply the output of a linear layer: γ·(W x + b) = (γ·W) x + γ·b."""
    if scale_C is not None:
        state[f"{layer}.weight"] = state[f"{layer}.weight"] * scale_C[:, None]
        state[f"{layer}.bias"] = state[f"{layer}.bias"] * scale_C


def _fold_norm(
    state: dict[str, Tensor], layer: str, tensors: Mapping[str, Tensor], norm: str
) -> None:
    """Multiply scale and bias of a norm into the layer that reads it."""
    weight, bias = state[f"{layer}.weight"].double(), state[f"{layer}.bias"].double()
    scale, shift = (tensors[f"{norm}.{part}"].double() for part in ("weight", "bias"))
    state[f"{layer}.weight"] = (weight * scale).float()
    state[f"{layer}.bias"] = (bias + weight @ shift).float()


def _resized(grid_PC: Tensor, *, patches: int) -> Tensor:
    """Resize the position embeddings of patches to another number of them."""
    if len(grid_PC) == patches:
        return grid_PC
    old, new = math.isqrt(len(grid_PC)), math.isqrt(patches)
    picture = grid_PC.T.reshape(1, -1, old, old)
    resized = F.interpolate(picture, size=(new, new), mode="bicubic", antialias=True)
    return resized.flatten(2)[0].T
