"""Read a pre-trained vision transformer as the first expert.

The file is safetensors in timm's key names: a plain pre-norm ViT with a class token, with or
without a classification head. Sizes are read from the tensors; nothing in the file is trusted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from model_store.errors import DataRejected, SpecInvalid, WrongUsage
from model_store.network.expert import Expert
from model_store.spec import ExpertSpec, NetworkSpec, Shape
from model_store.store.shard import Stored, read_layout

MAX_FILE_BYTES = 8 << 30
LAYER_NORM_EPS = 1e-6
"""The value that timm uses for every vision transformer; no file has it."""
READ_WIDTH = 32
"""The channels of a slice that younger experts read."""
NARROWEST_WITH_64 = 192
HEADS_OF_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Plain transformers whose attention heads do not have 64 channels: SO400M, H, g and G."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of a number, of the types that are read and of others that a file may hold."""
NOT_READ = ("head.", "pre_logits.")
"""Prefixes of layers after the token, which classify other classes."""
LAYERS = {
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "widen": "mlp.fc1",
    "narrow": "mlp.fc2",
    "norm1": "norm1",
    "norm2": "norm2",
}
"""The layers of a block, by our names and by timm's."""

_BLOCK = re.compile(r"blocks\.(\d{1,4})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """The weights of one file by timm's names, and the sizes that they imply."""

    sha256: str
    tensors: Mapping[str, Tensor]
    geometry: NetworkSpec
    """The geometry that the file was trained with, without tasks."""
    expert: ExpertSpec

    @property
    def width(self) -> int:
        return self.expert.heads * READ_WIDTH

    def expert_state(self, geometry: NetworkSpec) -> dict[str, Tensor]:
        """Name the weights as an expert's parameters, for any image size."""
        state = {
            "patch_embed.weight": self.tensors["patch_embed.proj.weight"],
            "patch_embed.bias": self.tensors["patch_embed.proj.bias"],
            "token": self.tensors["cls_token"].flatten(),
            "position": _resized(self.tensors["pos_embed"][0], patches=geometry.patches),
            "norm.weight": self.tensors["norm.weight"],
            "norm.bias": self.tensors["norm.bias"],
        }
        for block in range(geometry.depth):
            for ours, theirs in LAYERS.items():
                for part in ("weight", "bias"):
                    name = f"blocks.{block}.{theirs}.{part}"
                    if name in self.tensors:
                        state[f"blocks.{block}.{ours}.{part}"] = self.tensors[name]
        return state

    def load_into(self, expert: Expert, *, geometry: NetworkSpec) -> None:
        expert.load_state_dict(self.expert_state(geometry))


def read_pretrained(path: Path, *, attention_heads: int | None = None) -> Pretrained:
    """Read a file. Raise DataRejected, which names the expected and the found, for any other."""
    data = _read(path)
    try:
        layout = read_layout(data, item_bytes=ITEM_BYTES)
    except ValueError as error:
        raise DataRejected(f"{path} is not a safetensors file of weights: {error}") from error
    geometry, width = _sizes(path, {name: stored.shape for name, stored in layout.items()})
    expected = _expected(geometry, width)
    _check(path, layout, expected=expected)
    return Pretrained(
        sha256=hashlib.sha256(data).hexdigest(),
        tensors={name: _tensor(path, name, data, layout[name]) for name in expected},
        geometry=geometry,
        expert=ExpertSpec(
            heads=width // READ_WIDTH,
            attention_heads=_attention_heads(path, width=width, asked=attention_heads),
        ),
    )


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise WrongUsage(f"--pretrained {path} is not a file")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataRejected(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        return path.read_bytes()
    except OSError as error:
        raise WrongUsage(f"--pretrained {path}: {error.strerror}") from error


def _sizes(path: Path, shapes: Mapping[str, Shape]) -> tuple[NetworkSpec, int]:
    """Derive geometry and width from the shapes of the tensors."""
    asked = {"patch_embed.proj.weight": 4, "pos_embed": 3, "cls_token": 3}
    asked |= {"blocks.0.mlp.fc1.weight": 2}
    for name, dimensions in asked.items():
        found = shapes.get(name)
        if found is None or len(found) != dimensions:
            shown = f"it has {list(found)}" if found else f"it is not among {_named(shapes)}"
            raise DataRejected(
                f"{path} is not a vision transformer in timm's names: expected {name} with "
                f"{dimensions} dimensions, and {shown}"
            )
    width, _, patch, _ = shapes["patch_embed.proj.weight"]
    hidden, positions = shapes["blocks.0.mlp.fc1.weight"][0], shapes["pos_embed"][1]
    side = round(max(0, positions - 1) ** 0.5)
    if side < 1 or side * side + 1 != positions:
        raise DataRejected(
            f"{path}: expected pos_embed for a square of patches and one class token, "
            f"found {positions} positions"
        )
    if width < READ_WIDTH or width % READ_WIDTH:
        raise DataRejected(f"{path}: expected a multiple of {READ_WIDTH} channels, found {width}")
    if hidden < width or hidden % width:
        raise DataRejected(
            f"{path}: expected a hidden layer of a multiple of {width} channels, found {hidden}"
        )
    blocks = {int(match[1]) for match in map(_BLOCK.match, shapes) if match}
    try:
        geometry = NetworkSpec(
            image_size=side * patch,
            patch_size=patch,
            depth=len(blocks),
            head_width=READ_WIDTH,
            mlp_ratio=hidden // width,
            layer_norm_eps=LAYER_NORM_EPS,
            qkv_bias="blocks.0.attn.qkv.bias" in shapes,
            token="in-sequence",
        )
    except SpecInvalid as error:
        raise DataRejected(f"{path} has sizes that no network can have: {error}") from error
    return geometry, width


def _expected(geometry: NetworkSpec, width: int) -> dict[str, Shape]:
    """List the tensors that are read, with their shapes."""
    hidden = width * geometry.mlp_ratio
    in_block: dict[str, Shape] = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.proj.weight": (width, width),
        "attn.proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.fc1.weight": (hidden, width),
        "mlp.fc1.bias": (hidden,),
        "mlp.fc2.weight": (width, hidden),
        "mlp.fc2.bias": (width,),
    }
    if geometry.qkv_bias:
        in_block["attn.qkv.bias"] = (3 * width,)
    expected: dict[str, Shape] = {
        "patch_embed.proj.weight": (width, 3, geometry.patch_size, geometry.patch_size),
        "patch_embed.proj.bias": (width,),
        "cls_token": (1, 1, width),
        "pos_embed": (1, geometry.positions, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for block in range(geometry.depth):
        expected |= {f"blocks.{block}.{name}": shape for name, shape in in_block.items()}
    return expected


def _check(path: Path, layout: Mapping[str, Stored], *, expected: Mapping[str, Shape]) -> None:
    for name, shape in expected.items():
        stored = layout.get(name)
        if stored is None:
            raise DataRejected(f"{path}: expected {name} {list(shape)}, and there is none")
        if stored.shape != shape or stored.dtype not in DTYPES:
            raise DataRejected(
                f"{path}: expected {name} {list(shape)} of {', '.join(DTYPES)}, "
                f"found {stored.dtype} {list(stored.shape)}"
            )
    extra = [name for name in layout if name not in expected and not name.startswith(NOT_READ)]
    if extra:
        raise DataRejected(
            f"{path} is not a plain vision transformer: found {_named(extra)}, "
            "which would have no effect here"
        )


def _tensor(path: Path, name: str, data: bytes, stored: Stored) -> Tensor:
    own = bytearray(data[stored.start : stored.end])  # aligned, unlike the file's offsets
    read = torch.frombuffer(own, dtype=DTYPES[stored.dtype]).reshape(stored.shape)
    tensor = read.to(torch.float32)
    if not tensor.isfinite().all():
        raise DataRejected(f"{path}: {name} holds a value that is not finite in float32")
    return tensor


def _attention_heads(path: Path, *, width: int, asked: int | None) -> int:
    """Choose the number of attention heads by the custom of the width: no tensor tells it."""
    if asked is None:
        custom = 64 if width >= NARROWEST_WITH_64 and width % 64 == 0 else 32
        return HEADS_OF_WIDTH.get(width, width // custom)
    if asked < 1 or width % asked:
        raise WrongUsage(
            f"--attention-heads {asked}: the {width} channels of {path} cannot be cut like that"
        )
    return asked


def _resized(position_PC: Tensor, *, patches: int) -> Tensor:
    """Resize position embeddings to another number of patches; keep that of the class token."""
    token, grid = position_PC[:1], position_PC[1:]
    if len(grid) == patches:
        return position_PC
    old, new = round(len(grid) ** 0.5), round(patches**0.5)
    picture = grid.T.reshape(1, -1, old, old)
    resized = F.interpolate(picture, size=(new, new), mode="bicubic", antialias=True)
    return torch.cat((token, resized.flatten(2)[0].T))


def _named(names: Mapping[str, object] | list[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(ascii(name)[1:-1][:60] for name in listed[:4])
    return f"{shown} and {len(listed) - 4} more" if len(listed) > 4 else shown or "no tensors"
