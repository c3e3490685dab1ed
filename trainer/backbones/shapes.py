"""Derive sizes and kind of a vision transformer from the names and shapes of its tensors.

What no tensor tells comes from the settings beside the file, else from the custom of the family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from model_store.errors import DataRejected, SpecInvalid, WrongUsage
from model_store.spec import PLAIN, Activation, Backbone, NetworkSpec, Pooling, Shape, Token
from trainer.backbones.files import shown
from trainer.backbones.names import CLIP, DINOV3, Family, Named, Scheme
from trainer.backbones.settings import FileSettings, Triple

READ_WIDTH = 32
"""The channels of a slice that younger experts read."""
_NARROWEST_WITH_64 = 192
_HEADS_OF_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Plain transformers whose attention heads do not have 64 channels: SO400M, H, g and G."""
_LARGE_POSITIONS = (14, 37)
"""Patch size and patches of a side in files of DINOv2, whose last steps used 518 pixels."""
_CUSTOMARY_SIZE = 224
"""Pixels of an image's side for files whose positions fit any size, or 518 pixels."""
HALF: tuple[Triple, Triple] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET: tuple[Triple, Triple] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI: tuple[Triple, Triple] = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
EPS: Mapping[Family, float] = {
    "plain": 1e-6,
    "clip": 1e-5,
    "siglip": 1e-6,
    "dinov3": 1e-5,
    "eva02": 1e-6,
}
"""The custom of each family; no tensor tells it."""
LAYERS = {
    "attention.qkv": "attn.qkv",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "attention.out": "attn.proj",
    "widen": "mlp.fc1",
    "narrow": "mlp.fc2",
    "norm1": "norm1",
    "norm2": "norm2",
}
"""The layers of a block, by our names and by timm's."""
POOLING = {
    "attention.qkv": "attn_pool.qkv",
    "attention.out": "attn_pool.proj",
    "widen": "attn_pool.mlp.fc1",
    "narrow": "attn_pool.mlp.fc2",
    "norm1": "norm",
    "norm2": "attn_pool.norm",
}
"""The layers of an attention pooling, as those of a class-attention block."""
SCALED = {"attention.out": "ls1.gamma", "narrow": "ls2.gamma"}
"""Layers whose output a LayerScale multiplies, and its name in timm."""


def family_of(scheme: Scheme, named: Named) -> Family:
    if "attn_pool.latent" in named:
        return "siglip"
    if scheme is CLIP or "norm_pre.weight" in named:
        return "clip"
    if scheme is DINOV3 or "pos_embed" not in named:
        return "dinov3"
    # No tensor tells that positions are rotary: EVA-02 is known by SwiGLU without LayerScale.
    if _is_gated(named) and "blocks.0.ls1.gamma" not in named:
        return "eva02"
    return "plain"


def _is_gated(named: Named) -> bool:
    """Tell SwiGLU by its first layer, which writes twice the channels that the second reads."""
    widened = named.shape("blocks.0.mlp.fc1.weight")
    narrowed = named.shape("blocks.0.mlp.fc2.weight")
    if not widened or not narrowed:
        return False
    return widened[0] == 2 * narrowed[-1]


def width_of(named: Named, settings: FileSettings) -> int:
    width = _shape(named, "patch_embed.proj.weight", dimensions=4)[0]
    if settings.width is not None and settings.width != width:
        raise DataRejected(
            f"{settings.source} is of a model with {settings.width} channels, and "
            f"{named.file.path} has {width}: put the file into a folder without it"
        )
    if width < READ_WIDTH or width % READ_WIDTH:
        raise DataRejected(
            f"{named.file.path}: expected a multiple of {READ_WIDTH} channels, found {width}"
        )
    return width


def _shape(named: Named, name: str, *, dimensions: int) -> Shape:
    """Return the shape of a tensor that sizes are derived from."""
    found = named.shape(name)
    if found is None or len(found) != dimensions or 0 in found:
        there = f"it has {list(found)}" if found else f"it is not among {shown(named.file.places)}"
        raise DataRejected(
            f"{named.file.path} is not a vision transformer of a known family: expected "
            f"{named.theirs(name)} with {dimensions} dimensions, and {there}"
        )
    return found


def geometry_of(named: Named, family: Family, width: int, settings: FileSettings) -> NetworkSpec:
    """Derive the geometry from the shapes of the tensors."""
    patch = _shape(named, "patch_embed.proj.weight", dimensions=4)[-1]
    hidden = _shape(named, "blocks.0.mlp.fc2.weight", dimensions=2)[1]
    backbone = _backbone(named, family, settings, hidden=hidden)
    token: Token = "class-attention" if backbone.pooling == "attention" else "in-sequence"
    try:
        return NetworkSpec(
            image_size=_image_size(named, backbone, patch=patch, settings=settings),
            patch_size=patch,
            depth=named.depth,
            head_width=READ_WIDTH,
            mlp_ratio=math.ceil(hidden / width),
            layer_norm_eps=settings.layer_norm_eps or EPS[family],
            qkv_bias="blocks.0.attn.qkv.bias" in named,
            token=token,
            backbone=None if backbone == PLAIN else backbone,
        )
    except SpecInvalid as error:
        raise DataRejected(
            f"{named.file.path} has sizes that no network can have: {error}"
        ) from error


def _backbone(named: Named, family: Family, settings: FileSettings, *, hidden: int) -> Backbone:
    try:
        return Backbone(
            registers=_registers(named),
            rotary=family in ("dinov3", "eva02"),
            activation=_activation(named, family, settings),
            pre_norm="norm_pre.weight" in named,
            qk_norm="blocks.0.attn.q_norm.weight" in named,
            hidden_norm=hidden if "blocks.0.mlp.norm.weight" in named else 0,
            pooling=_pooling(named, family),
        )
    except SpecInvalid as error:
        raise DataRejected(
            f"{named.file.path}: {error}; found {named.first('attn_pool.latent')}"
        ) from error


def _pooling(named: Named, family: Family) -> Pooling:
    if family == "siglip":
        return "attention"
    if "fc_norm.weight" in named:
        return "mean"
    # Patches add to a token that was taught classes, and not to that of DINOv2; see ADR 56.
    taught = family == "plain" and "blocks.0.ls1.gamma" not in named
    return "token-and-mean" if taught else "token"


def _registers(named: Named) -> int:
    """Count the rows that are neither the class token nor patches."""
    registers = _shape_of_registers(named)[1] if "reg_token" in named else 0
    return registers + ("dist_token" in named)


def _shape_of_registers(named: Named) -> Shape:
    found = named.shape("reg_token") or ()
    return found if len(found) == 3 else (1, 0, 0)


def _activation(named: Named, family: Family, settings: FileSettings) -> Activation:
    if _is_gated(named):
        return "swiglu"
    if settings.activation == "swiglu":
        raise DataRejected(
            f"{settings.source}: expected a gate for hidden_act silu, and "
            f"{named.theirs('blocks.0.mlp.fc1.weight')} has none"
        )
    if settings.activation is not None:
        return settings.activation
    if family == "siglip":
        return "tanh-gelu"
    # timm keeps apart files with quick GELU, and says so in their settings.
    in_timm = named.first("patch_embed.proj.weight") == "patch_embed.proj.weight"
    return "quick-gelu" if family == "clip" and not in_timm else "gelu"


def _image_size(named: Named, kind: Backbone, *, patch: int, settings: FileSettings) -> int:
    if "pos_embed" not in named:
        return settings.image_size or _CUSTOMARY_SIZE
    positions = math.prod((named.shape("pos_embed") or (0,))[:-1])
    in_sequence = kind.pooling != "attention"
    before = rows_before(positions, int(in_sequence), kind.registers)
    if before is None:
        raise DataRejected(
            f"{named.file.path}: expected {named.theirs('pos_embed')} for a square of patches "
            f"and {'one class token' if in_sequence else 'no class token'}, "
            f"found {positions} positions"
        )
    side = math.isqrt(positions - before)
    if "blocks.0.ls1.gamma" in named and (patch, side) == _LARGE_POSITIONS:
        return _CUSTOMARY_SIZE
    return side * patch


def rows_before(positions: int, tokens: int, others: int) -> int | None:
    """Count the positions before those of the patches: of token and others, the token, or none."""
    for before in (tokens + others, tokens, 0):
        patches = positions - before
        if patches > 0 and math.isqrt(patches) ** 2 == patches:
            return before
    return None


def expected_tensors(
    named: Named, geometry: NetworkSpec, *, width: int, heads: int, family: Family
) -> Iterator[tuple[str, Shape]]:
    """List the tensors that are read, with their shapes."""
    kind, patch = geometry.first, geometry.patch_size
    hidden = _shape(named, "blocks.0.mlp.fc2.weight", dimensions=2)[1]
    yield "patch_embed.proj.weight", (width, 3, patch, patch)
    if family != "clip" or "patch_embed.proj.bias" in named:
        yield "patch_embed.proj.bias", (width,)
    if "pos_embed" in named:
        found = named.shape("pos_embed") or ()
        yield "pos_embed", (*((1,) if len(found) == 3 else ()), math.prod(found[:-1]), width)
    pooled = kind.pooling == "attention"
    yield _vector(named, "attn_pool.latent" if pooled else "cls_token", width)
    if "dist_token" in named:
        yield _vector(named, "dist_token", width)
    if "reg_token" in named:
        yield "reg_token", (1, _shape_of_registers(named)[1], width)
    norms = ["fc_norm" if kind.pooling == "mean" else "norm"]
    norms += ["norm_pre"] if kind.pre_norm else []
    for norm in norms:
        yield from _both(norm, (width,))
    layers = dict(_layers(kind, width=width, hidden=hidden, qkv_bias=geometry.qkv_bias))
    if "blocks.0.ls1.gamma" in named:
        layers |= dict.fromkeys(SCALED.values(), (width,))
    if kind.qk_norm:
        for norm in ("attn.q_norm", "attn.k_norm"):
            layers |= dict(_both(norm, (width // heads,)))
    if kind.hidden_norm:
        layers |= dict(_both("mlp.norm", (hidden,)))
    for block in range(geometry.depth):
        yield from ((f"blocks.{block}.{name}", shape) for name, shape in layers.items())
    if pooled:
        names = {theirs: ours for ours, theirs in LAYERS.items()}
        for name, shape in layers.items():
            layer, _, part = name.rpartition(".")
            if names.get(layer) in POOLING and layer != "norm1":
                yield f"{POOLING[names[layer]]}.{part}", shape


def _layers(
    kind: Backbone, *, width: int, hidden: int, qkv_bias: bool
) -> Iterator[tuple[str, Shape]]:
    """List the tensors of a block that every family has."""
    yield from _both("norm1", (width,))
    yield "attn.qkv.weight", (3 * width, width)
    if qkv_bias:
        yield "attn.qkv.bias", (3 * width,)
    yield from _both("attn.proj", (width, width))
    yield from _both("norm2", (width,))
    yield from _both("mlp.fc1", (hidden * (2 if kind.activation == "swiglu" else 1), width))
    yield from _both("mlp.fc2", (width, hidden))


def _both(layer: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{layer}.weight", shape
    yield f"{layer}.bias", shape[:1]


def _vector(named: Named, name: str, width: int) -> tuple[str, Shape]:
    return name, (width,) if named.shape(name) == (width,) else (1, 1, width)


def customary_normalisation(named: Named, family: Family) -> tuple[Triple, Triple]:
    if family in ("clip", "eva02"):
        return OPENAI
    # DINOv2 and DeiT III have LayerScale, DeiT a token of its own; plain files are AugReg's.
    signs = ("blocks.0.ls1.gamma", "reg_token", "dist_token")
    imagenet = family == "dinov3" or any(sign in named for sign in signs)
    return IMAGENET if imagenet else HALF


def attention_heads_of(path: Path, *, width: int, asked: int | None, settings: FileSettings) -> int:
    """Choose the number of attention heads: by the settings, or by the custom of the width."""
    if asked is None:
        custom = 64 if width >= _NARROWEST_WITH_64 and width % 64 == 0 else 32
        heads = settings.attention_heads or _HEADS_OF_WIDTH.get(width, width // custom)
        if width % heads:
            raise DataRejected(
                f"{settings.source}: the {width} channels of {path} cannot be cut into "
                f"{heads} attention heads"
            )
        return heads
    if asked < 1 or width % asked:
        raise WrongUsage(
            f"`attention_heads={asked}`: the {width} channels of {path} cannot be cut like that"
        )
    return asked
