"""Pre-trained files for tests, and a forward pass of them that knows nothing of our network.

The pass is written from timm's definition of a plain vision transformer, in plain torch functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

_SHARED = next(
    (one for one in (up / "shared/data" for up in Path(__file__).parents) if one.is_dir()),
    Path("shared/data"),
)
REAL = _SHARED / "vit_tiny_patch16_224.safetensors"
REAL_DINOV2 = _SHARED / "dinov2_vits14.fp16.safetensors"
"""Not part of the project: tests that need them are skipped where they are not."""


SLICE = 2 * 64
"""The channels of the slice of `made_up`: its token, and the mean of its patches."""


def made_up(
    *,
    width: int = 64,
    depth: int = 2,
    image_size: int = 8,
    patch_size: int = 4,
    mlp_ratio: int = 2,
    qkv_bias: bool = True,
    classes: int = 3,
    layer_scale: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The tensors of a small vision transformer by timm's names, far from any special value."""
    hidden, positions = width * mlp_ratio, (image_size // patch_size) ** 2 + 1
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, positions, width),
        "patch_embed.proj.weight": (width, 3, patch_size, patch_size),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for block in range(depth):
        for layer, (written, read) in {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (hidden, width),
            "mlp.fc2": (width, hidden),
        }.items():
            shapes[f"blocks.{block}.{layer}.weight"] = (written, read)
            if qkv_bias or layer != "attn.qkv":
                shapes[f"blocks.{block}.{layer}.bias"] = (written,)
        for layer in ("norm1", "norm2"):
            shapes[f"blocks.{block}.{layer}.weight"] = (width,)
            shapes[f"blocks.{block}.{layer}.bias"] = (width,)
        if layer_scale:
            shapes |= {f"blocks.{block}.{layer}.gamma": (width,) for layer in ("ls1", "ls2")}
    if classes:
        shapes |= {"head.weight": (classes, width), "head.bias": (classes,)}
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def write_vit(path: Path, tensors: Mapping[str, Tensor] | None = None) -> Path:
    save_file(dict(made_up() if tensors is None else tensors), path)
    return path


def slice_of(tensors: Mapping[str, Tensor], images: Tensor, *, heads: int) -> Tensor:
    """The class token and, without LayerScale, the mean of the patches, both after the last norm.

    Position embeddings must fit the images.
    """
    kernel = tensors["patch_embed.proj.weight"]
    x = F.conv2d(images, kernel, tensors["patch_embed.proj.bias"], stride=kernel.shape[-1])
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat((tensors["cls_token"].expand(len(x), -1, -1), x), dim=1) + tensors["pos_embed"]

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(x, (len(weight),), weight, bias, eps=1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    block = 0
    while f"blocks.{block}.norm1.weight" in tensors:
        here = f"blocks.{block}"
        batch, positions, width = x.shape
        qkv = linear(norm(x, f"{here}.norm1"), f"{here}.attn.qkv")
        q, k, v = qkv.reshape(batch, positions, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) * (width // heads) ** -0.5).softmax(dim=-1)
        read = (attention @ v).transpose(1, 2).reshape(batch, positions, width)
        x = x + linear(read, f"{here}.attn.proj") * tensors.get(f"{here}.ls1.gamma", 1)
        hidden = F.gelu(linear(norm(x, f"{here}.norm2"), f"{here}.mlp.fc1"))
        x = x + linear(hidden, f"{here}.mlp.fc2") * tensors.get(f"{here}.ls2.gamma", 1)
        block += 1
    normed = norm(x, "norm")
    if "blocks.0.ls1.gamma" in tensors:
        return normed[:, 0]
    return torch.cat((normed[:, 0], normed[:, 1:].mean(dim=1)), dim=-1)


def resampled(pos_embed: Tensor, *, side: int) -> Tensor:
    """timm's `resample_abs_pos_embed`: the grid as a picture, bicubic and antialiased."""
    token, grid = pos_embed[:, :1], pos_embed[:, 1:]
    old = int(grid.shape[1] ** 0.5)
    picture = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2)
    picture = F.interpolate(picture, size=(side, side), mode="bicubic", antialias=True)
    return torch.cat((token, picture.permute(0, 2, 3, 1).reshape(1, side * side, -1)), dim=1)
