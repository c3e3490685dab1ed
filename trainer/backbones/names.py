"""Recognise a file by the names of its tensors, and give the tensors one set of names: timm's.

A scheme is the names of one library for one family. Queries, keys and values may lie in one tensor
or in three, and so may gate and value of a SwiGLU; the parts are joined when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model_store.errors import DataRejected
from model_store.spec import Shape
from trainer.backbones.files import DTYPES, WeightFile, shown

Parts = tuple[str, ...]
Family = Literal["plain", "clip", "siglip", "dinov3", "eva02"]
"""The families that differ in more than tensors tell; DINOv2, DeiT and AugReg are plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Names of tensors, before a prefix is added. Each of ours has alternatives, in parts."""

    sign: str
    """A tensor by which the scheme is recognised."""
    prefixes: tuple[str, ...] = ("",)
    edges: Mapping[str, tuple[Parts, ...]]
    block: tuple[str, ...]
    """The prefixes of a block, with a place for its number."""
    layers: Mapping[str, tuple[Parts, ...]]
    passed: tuple[str, ...] = ()
    """Beginnings of names that are not read: heads for other classes, text, tokens of training."""


def _both(ours: str, *theirs: str | Parts) -> dict[str, tuple[Parts, ...]]:
    """Name weight and bias of a layer, by each of the alternatives."""
    layers = [(one,) if isinstance(one, str) else one for one in theirs]
    return {
        f"{ours}.{kind}": tuple(tuple(f"{name}.{kind}" for name in layer) for layer in layers)
        for kind in ("weight", "bias")
    }


def _one(ours: str, *theirs: str) -> dict[str, tuple[Parts, ...]]:
    return {ours: tuple((name,) for name in theirs)}


def _qkv(*layers: str) -> tuple[Parts, ...]:
    """Name queries, keys and values in three layers, for a pattern with a place for q, k or v."""
    return tuple(tuple(layer.format(one) for one in "qkv") for layer in layers)


_TIMM_QKV = _both("attn.qkv", "attn.qkv", *_qkv("attn.{}_proj"))
_TIMM_QKV["attn.qkv.bias"] += _qkv("attn.{}_bias")

TIMM = Scheme(
    sign="patch_embed.proj.weight",
    edges={
        **_one("cls_token", "cls_token"),
        **_one("dist_token", "dist_token"),
        **_one("reg_token", "reg_token", "register_tokens"),
        **_one("pos_embed", "pos_embed"),
        **_both("patch_embed.proj", "patch_embed.proj"),
        **_both("norm_pre", "norm_pre"),
        **_both("norm", "norm"),
        **_both("fc_norm", "fc_norm"),
        **_one("attn_pool.latent", "attn_pool.latent"),
        **_both("attn_pool.qkv", ("attn_pool.q", "attn_pool.kv")),
        **_both("attn_pool.proj", "attn_pool.proj"),
        **_both("attn_pool.norm", "attn_pool.norm"),
        **_both("attn_pool.mlp.fc1", "attn_pool.mlp.fc1"),
        **_both("attn_pool.mlp.fc2", "attn_pool.mlp.fc2"),
    },
    block=("blocks.{}.",),
    layers={
        **_both("norm1", "norm1"),
        **_TIMM_QKV,
        **_both("attn.q_norm", "attn.q_norm"),
        **_both("attn.k_norm", "attn.k_norm"),
        **_both("attn.proj", "attn.proj"),
        **_one("ls1.gamma", "ls1.gamma", "gamma_1"),
        **_both("norm2", "norm2"),
        **_both("mlp.fc1", "mlp.fc1", "mlp.w12", ("mlp.fc1_g", "mlp.fc1_x")),
        **_both("mlp.norm", "mlp.norm"),
        **_both("mlp.fc2", "mlp.fc2", "mlp.w3"),
        **_one("ls2.gamma", "ls2.gamma", "gamma_2"),
    },
    passed=("head.", "head_dist.", "pre_logits.", "mask_token", "rope.", "rope_embed."),
)
"""timm; the authors of DINO, DINOv2 and DINOv3 use the same names."""

_HUGGING_FACE = Scheme(
    sign="embeddings.patch_embeddings.projection.weight",
    prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers.", "model."),
    edges={
        **_one("cls_token", "embeddings.cls_token"),
        **_one("dist_token", "embeddings.distillation_token"),
        **_one("reg_token", "embeddings.register_tokens"),
        **_one("pos_embed", "embeddings.position_embeddings"),
        **_both("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        **_both("norm", "layernorm"),
    },
    block=("encoder.layer.{}.", "encoder.layers.{}.", "layers.{}."),
    layers={
        **_both("norm1", "layernorm_before", "norm1"),
        **_both(
            "attn.qkv",
            ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
            *_qkv("attention.{}_proj"),
        ),
        **_both("attn.proj", "attention.output.dense", "attention.o_proj"),
        **_one("ls1.gamma", "layer_scale1.lambda1"),
        **_both("norm2", "layernorm_after", "norm2"),
        **_both(
            "mlp.fc1",
            "intermediate.dense",
            "mlp.fc1",
            "mlp.weights_in",
            ("mlp.gate_proj", "mlp.up_proj"),
        ),
        **_both("mlp.fc2", "output.dense", "mlp.fc2", "mlp.weights_out", "mlp.down_proj"),
        **_one("ls2.gamma", "layer_scale2.lambda1"),
    },
    passed=(
        "pooler.",
        "classifier.",
        "cls_classifier.",
        "distillation_classifier.",
        "embeddings.mask_token",
        "decoder.",
    ),
)
"""`transformers`: ViT, DeiT, DINO, DINOv2 with and without registers."""

CLIP = Scheme(
    sign="embeddings.patch_embedding.weight",
    prefixes=("vision_model.", "", "clip.vision_model.", "siglip.vision_model."),
    edges={
        **_one("cls_token", "embeddings.class_embedding"),
        **_one("pos_embed", "embeddings.position_embedding.weight"),
        **_both("patch_embed.proj", "embeddings.patch_embedding"),
        **_both("norm_pre", "pre_layrnorm"),
        **_both("norm", "post_layernorm"),
        **_one("attn_pool.latent", "head.probe"),
        "attn_pool.qkv.weight": (("head.attention.in_proj_weight",),),
        "attn_pool.qkv.bias": (("head.attention.in_proj_bias",),),
        **_both("attn_pool.proj", "head.attention.out_proj"),
        **_both("attn_pool.norm", "head.layernorm"),
        **_both("attn_pool.mlp.fc1", "head.mlp.fc1"),
        **_both("attn_pool.mlp.fc2", "head.mlp.fc2"),
    },
    block=("encoder.layers.{}.",),
    layers={
        **_both("norm1", "layer_norm1"),
        **_both("attn.qkv", *_qkv("self_attn.{}_proj")),
        **_both("attn.proj", "self_attn.out_proj"),
        **_both("norm2", "layer_norm2"),
        **_both("mlp.fc1", "mlp.fc1"),
        **_both("mlp.fc2", "mlp.fc2"),
    },
    passed=(
        "embeddings.position_ids",
        "visual_projection.",
        "text_projection.",
        "text_model.",
        "logit_",
        "classifier.",
    ),
)
"""`transformers`: the vision towers of CLIP and SigLIP, alone or beside the text tower."""

DINOV3 = Scheme(
    sign="embeddings.patch_embeddings.weight",
    prefixes=("", "dinov3_vit."),
    edges={
        **_one("cls_token", "embeddings.cls_token"),
        **_one("reg_token", "embeddings.register_tokens"),
        **_both("patch_embed.proj", "embeddings.patch_embeddings"),
        **_both("norm", "norm"),
    },
    block=("layer.{}.", "model.layer.{}."),
    layers={
        **_both("norm1", "norm1"),
        **_both("attn.qkv", *_qkv("attention.{}_proj")),
        **_both("attn.proj", "attention.o_proj"),
        **_one("ls1.gamma", "layer_scale1.lambda1"),
        **_both("norm2", "norm2"),
        **_both("mlp.fc1", ("mlp.gate_proj", "mlp.up_proj"), "mlp.up_proj"),
        **_both("mlp.fc2", "mlp.down_proj"),
        **_one("ls2.gamma", "layer_scale2.lambda1"),
    },
    passed=("embeddings.mask_token", "rope_embeddings.", "classifier."),
)
"""`transformers`: DINOv3."""

SCHEMES = (TIMM, _HUGGING_FACE, CLIP, DINOV3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The tensors of a file by timm's names, such as `blocks.0.attn.qkv.weight`."""

    file: WeightFile
    depth: int
    parts: Mapping[str, Parts]
    """The names in the file of the parts that make each tensor, in their order."""
    missing: Mapping[str, Parts]
    """The names that tensors would have in the file if they were there."""

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def first(self, *names: str) -> str | None:
        """Find the first of these tensors that is there, and give its name in the file."""
        return next((self.parts[name][0] for name in names if name in self.parts), None)

    def theirs(self, name: str) -> str:
        """Return the name in the file of a tensor, whether it is there or not."""
        return " + ".join(self.parts.get(name) or self.missing.get(name, (name,)))

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor, whose parts are joined along its first axis."""
        shapes = [self.file.shape(part) for part in self.parts.get(name, ())]
        known = [one for one in shapes if one is not None]
        if not known:
            return None
        if len(shapes) > 1 and any(not one or one[1:] != known[0][1:] for one in known):
            return None
        # A bias that is not there is zero, as that of the keys in many files.
        rows = sum(known[0][0] if one is None else one[0] for one in shapes) if known[0] else 0
        return (rows, *known[0][1:]) if len(shapes) > 1 else known[0]

    def tensor(self, name: str) -> Tensor:
        parts = self.parts[name]
        there = {part: self.file.tensor(part) for part in parts if part in self.file.places}
        like = next(iter(there.values()))
        return torch.cat([there.get(part, torch.zeros_like(like)) for part in parts]).reshape(
            self.shape(name) or like.shape
        )

    def expect(self, name: str, shape: Shape) -> None:
        """Raise DataRejected unless a tensor is there with this shape and a type that is read."""
        if name not in self.parts:
            raise DataRejected(
                f"{self.file.path}: expected {self.theirs(name)} {list(shape)}, which is missing"
            )
        there = [part for part in self.parts[name] if part in self.file.places]
        types = {self.file.dtype(part) for part in there}
        if self.shape(name) != shape or not types <= set(DTYPES):
            found = ", ".join(
                f"{self.file.dtype(part)} {list(self.file.shape(part) or ())}" for part in there
            )
            raise DataRejected(
                f"{self.file.path}: expected {self.theirs(name)} {list(shape)} of "
                f"{', '.join(DTYPES)}, found {found}"
            )

    def refuse_others(self, *, read: set[str], passed: tuple[str, ...]) -> None:
        """Raise DataRejected if a tensor is left that would have no effect."""
        known = {part for name in read for part in self.parts[name]}
        left = [
            name for name in self.file.places if name not in known and not name.startswith(passed)
        ]
        if left:
            raise DataRejected(
                f"{self.file.path} is not a vision transformer of a known family: found "
                f"{shown(left)}, which would have no effect here"
            )


def recognise(file: WeightFile) -> tuple[Scheme, Named, tuple[str, ...]]:
    """Find the scheme of a file; name its tensors; list the beginnings of names not to read."""
    for scheme in SCHEMES:
        for prefix in scheme.prefixes:
            if f"{prefix}{scheme.sign}" in file.places:
                passed = (*scheme.passed, *(f"{prefix}{one}" for one in scheme.passed))
                return scheme, _named(file, scheme, prefix), passed
    raise DataRejected(
        f"{file.path} is not a vision transformer in the names of timm or transformers: expected "
        f"one of {', '.join(scheme.sign for scheme in SCHEMES)}, "
        f"and none is among {shown(file.places)}"
    )


def _named(file: WeightFile, scheme: Scheme, prefix: str) -> Named:
    block, depth = _blocks(file, scheme, prefix)
    parts: dict[str, Parts] = {}
    missing: dict[str, Parts] = {}
    for ours, theirs in _all_names(scheme, prefix, block, depth):
        whole = next((one for one in theirs if _there(file, one) == len(one)), None)
        part = next((one for one in theirs if _there(file, one)), None)
        if whole or (part and ours.endswith(".bias")):  # a part of a bias may be left out
            parts[ours] = whole or part or ()
        else:
            missing[ours] = part or theirs[0]
    return Named(file=file, depth=depth, parts=parts, missing=missing)


def _there(file: WeightFile, parts: Parts) -> int:
    return sum(part in file.places for part in parts)


def _all_names(
    scheme: Scheme, prefix: str, block: str, depth: int
) -> Iterator[tuple[str, list[Parts]]]:
    for ours, theirs in scheme.edges.items():
        yield ours, [tuple(f"{prefix}{part}" for part in one) for one in theirs]
    for number in range(depth):
        here = f"{prefix}{block.format(number)}"
        for ours, theirs in scheme.layers.items():
            named = [tuple(f"{here}{part}" for part in one) for one in theirs]
            yield f"blocks.{number}.{ours}", named


def _blocks(file: WeightFile, scheme: Scheme, prefix: str) -> tuple[str, int]:
    """Find the prefix of blocks, and count the blocks."""
    for block in scheme.block:
        before, after = f"{prefix}{block}".split("{}")
        pattern = re.compile(re.escape(before) + r"(\d{1,4})" + re.escape(after))
        numbers = {int(match[1]) for match in map(pattern.match, file.places) if match}
        if numbers:
            return block, len(numbers)
    return scheme.block[0], 0
