"""Small files of the usual families of vision transformers, and forward passes of their own.

Each family is written from its definition in timm or transformers, out of `tower_blocks.py`, which
knows nothing of our network. The weights are random, and the names are those of real files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.tower_blocks import (
    DEPTH,
    HEADS,
    PATCH,
    WIDTH,
    Blocks,
    Shapes,
    Tensors,
    before,
    beside,
    drawn,
    embedding,
    linear,
    linear_shapes,
    norm,
    norm_shapes,
    patches,
    quick_gelu,
    swiglu,
    tanh_gelu,
)


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A file of a family, the settings beside it, and its slice of the token of images."""

    tensors: Tensors
    forward: Callable[[Tensor], Tensor]
    config: Mapping[str, object] | None = None
    kind: Mapping[str, object] = field(default_factory=dict)
    """The values of `Backbone` that differ from the plain ones."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_size: int = 16


def write_tower(folder: Path, tower: Tower) -> Path:
    folder.mkdir(exist_ok=True)
    if tower.config is not None:
        (folder / "config.json").write_text(json.dumps(tower.config))
    path = folder / "model.safetensors"
    save_file(tower.tensors, path)
    return path


TIMM = Blocks(
    here="blocks.{}.",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    out="attn.proj",
    widen=("mlp.fc1",),
    narrow="mlp.fc2",
)
SCALES = ("ls1.gamma", "ls2.gamma")
IMAGENET = (0.485, 0.456, 0.406)
OPENAI = (0.48145466, 0.4578275, 0.40821073)
TOKEN: Shapes = {"cls_token": (1, 1, WIDTH)}


def timm_tower(blocks: Blocks, extra: Shapes, *, seed: int = 0) -> Tensors:
    shapes = blocks.shapes() | embedding("patch_embed.proj") | TOKEN | extra
    return drawn(shapes, seed=seed)


def dinov2_with_registers() -> Tower:
    """timm: positions of patches alone, four registers, LayerScale."""
    blocks = replace(TIMM, scales=SCALES)
    extra: Shapes = {"reg_token": (1, 4, WIDTH), "pos_embed": (1, 16, WIDTH)}
    t = timm_tower(blocks, extra | norm_shapes("norm"))

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, "patch_embed.proj") + t["pos_embed"]
        x = blocks(t, before(x, t["cls_token"], t["reg_token"]))
        return norm(t, x, "norm", 1e-6)[:, 0]

    return Tower(tensors=t, forward=forward, kind={"registers": 4}, mean=IMAGENET)


def dinov2_giant() -> Tower:
    """The authors' names of a SwiGLU, whose hidden layer is no multiple of the width."""
    blocks = replace(
        TIMM, scales=SCALES, widen=("mlp.w12",), narrow="mlp.w3", activate=swiglu, hidden=170
    )
    t = timm_tower(blocks, norm_shapes("norm") | {"pos_embed": (1, 17, WIDTH)})

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"]) + t["pos_embed"]
        return norm(t, blocks(t, x), "norm", 1e-6)[:, 0]

    return Tower(tensors=t, forward=forward, kind={"activation": "swiglu"}, mean=IMAGENET)


def deit_iii() -> Tower:
    """timm: the class token has no position, and there is LayerScale."""
    blocks = replace(TIMM, scales=SCALES)
    t = timm_tower(blocks, norm_shapes("norm") | {"pos_embed": (1, 16, WIDTH)})

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, "patch_embed.proj") + t["pos_embed"]
        return norm(t, blocks(t, before(x, t["cls_token"])), "norm", 1e-6)[:, 0]

    return Tower(tensors=t, forward=forward, mean=IMAGENET)


def deit_distilled() -> Tower:
    """timm: a token of distillation beside the class token, both with positions."""
    extra: Shapes = {"dist_token": (1, 1, WIDTH), "pos_embed": (1, 18, WIDTH)}
    t = timm_tower(TIMM, norm_shapes("norm") | extra | {"head_dist.weight": (3, WIDTH)})

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"], t["dist_token"])
        return beside(norm(t, TIMM(t, x + t["pos_embed"]), "norm", 1e-6), before=2)

    kind = {"registers": 1, "pooling": "token-and-mean"}
    return Tower(tensors=t, forward=forward, kind=kind, mean=IMAGENET)


def hugging_face_vit() -> Tower:
    """transformers: queries, keys and values apart, and another eps in its settings."""
    blocks = Blocks(
        here="vit.encoder.layer.{}.",
        norms=("layernorm_before", "layernorm_after"),
        qkv=tuple(f"attention.attention.{one}" for one in ("query", "key", "value")),
        out="attention.output.dense",
        widen=("intermediate.dense",),
        narrow="output.dense",
        eps=1e-2,
    )
    shapes = blocks.shapes() | embedding("vit.embeddings.patch_embeddings.projection")
    shapes |= norm_shapes("vit.layernorm") | linear_shapes("classifier", 3, WIDTH)
    shapes |= {
        "vit.embeddings.cls_token": (1, 1, WIDTH),
        "vit.embeddings.position_embeddings": (1, 17, WIDTH),
    }
    t = drawn(shapes)

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, "vit.embeddings.patch_embeddings.projection")
        x = before(x, t["vit.embeddings.cls_token"]) + t["vit.embeddings.position_embeddings"]
        return beside(norm(t, blocks(t, x), "vit.layernorm", 1e-2))

    config = {
        "model_type": "vit",
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "layer_norm_eps": 1e-2,
        "hidden_act": "gelu",
        "image_size": 16,
    }
    kind = {"pooling": "token-and-mean"}
    return Tower(tensors=t, forward=forward, config=config, kind=kind)


def hugging_face_dinov2() -> Tower:
    """transformers: DINOv2 with registers, whose class token has a position."""
    blocks = Blocks(
        here="encoder.layer.{}.",
        norms=("norm1", "norm2"),
        qkv=tuple(f"attention.attention.{one}" for one in ("query", "key", "value")),
        out="attention.output.dense",
        widen=("mlp.fc1",),
        narrow="mlp.fc2",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    )
    shapes = blocks.shapes() | embedding("embeddings.patch_embeddings.projection")
    shapes |= norm_shapes("layernorm") | {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.mask_token": (1, WIDTH),
        "embeddings.register_tokens": (1, 4, WIDTH),
        "embeddings.position_embeddings": (1, 17, WIDTH),
    }
    t = drawn(shapes)

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, "embeddings.patch_embeddings.projection")
        x = before(x, t["embeddings.cls_token"]) + t["embeddings.position_embeddings"]
        registers = t["embeddings.register_tokens"].expand(len(x), -1, -1)
        x = blocks(t, torch.cat((x[:, :1], registers, x[:, 1:]), dim=1))
        return norm(t, x, "layernorm", 1e-6)[:, 0]

    return Tower(tensors=t, forward=forward, kind={"registers": 4}, mean=IMAGENET)


CLIP = Blocks(
    here="vision_model.encoder.layers.{}.",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    widen=("mlp.fc1",),
    narrow="mlp.fc2",
    activate=quick_gelu,
    eps=1e-5,
)


def clip() -> Tower:
    """transformers: a norm before the blocks, quick GELU, beside the text tower."""
    v = "vision_model."
    shapes = CLIP.shapes() | embedding(f"{v}embeddings.patch_embedding", bias=False)
    shapes |= norm_shapes(f"{v}pre_layrnorm", f"{v}post_layernorm") | {
        f"{v}embeddings.class_embedding": (WIDTH,),
        f"{v}embeddings.position_embedding.weight": (17, WIDTH),
        "visual_projection.weight": (32, WIDTH),
        "text_model.final_layer_norm.weight": (WIDTH,),
        "logit_scale": (1,),
    }
    t = drawn(shapes)

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, f"{v}embeddings.patch_embedding")
        x = before(x, t[f"{v}embeddings.class_embedding"])
        x = x + t[f"{v}embeddings.position_embedding.weight"]
        x = CLIP(t, norm(t, x, f"{v}pre_layrnorm", 1e-5))
        return norm(t, x, f"{v}post_layernorm", 1e-5)[:, 0]

    kind = {"pre_norm": True, "activation": "quick-gelu"}
    return Tower(tensors=t, forward=forward, kind=kind, mean=OPENAI)


def clip_in_timm() -> Tower:
    """timm: quick GELU is in the settings."""
    blocks = replace(TIMM, activate=quick_gelu, eps=1e-5)
    extra: Shapes = {"pos_embed": (1, 17, WIDTH), "head.weight": (32, WIDTH)}
    t = timm_tower(blocks, norm_shapes("norm", "norm_pre") | extra)
    del t["patch_embed.proj.bias"]

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"]) + t["pos_embed"]
        x = blocks(t, norm(t, x, "norm_pre", 1e-5))
        return norm(t, x, "norm", 1e-5)[:, 0]

    mean = [0.1, 0.2, 0.3]
    config = {
        "architecture": "vit_base_patch16_clip_quickgelu_224",
        "num_features": WIDTH,
        "pretrained_cfg": {"mean": mean, "std": [1, 1, 1], "input_size": [3, 16, 16]},
    }
    kind = {"pre_norm": True, "activation": "quick-gelu"}
    return Tower(tensors=t, forward=forward, config=config, kind=kind, mean=(0.1, 0.2, 0.3))


def siglip() -> Tower:
    """transformers: no class token; a learnt query reads the patches. The hidden layer has no
    multiple of the width."""
    v = "vision_model."
    blocks = replace(CLIP, activate=tanh_gelu, eps=1e-6, hidden=150)
    shapes = blocks.shapes() | embedding(f"{v}embeddings.patch_embedding")
    shapes |= norm_shapes(f"{v}post_layernorm", f"{v}head.layernorm")
    shapes |= linear_shapes(f"{v}head.attention.out_proj", WIDTH, WIDTH)
    shapes |= linear_shapes(f"{v}head.mlp.fc1", 150, WIDTH)
    shapes |= linear_shapes(f"{v}head.mlp.fc2", WIDTH, 150)
    t = drawn(
        {
            **shapes,
            f"{v}embeddings.position_embedding.weight": (16, WIDTH),
            f"{v}head.probe": (1, 1, WIDTH),
            f"{v}head.attention.in_proj_weight": (3 * WIDTH, WIDTH),
            f"{v}head.attention.in_proj_bias": (3 * WIDTH,),
        }
    )

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, f"{v}embeddings.patch_embedding")
        x = blocks(t, x + t[f"{v}embeddings.position_embedding.weight"])
        x = norm(t, x, f"{v}post_layernorm", 1e-6)
        weights = t[f"{v}head.attention.in_proj_weight"].chunk(3)
        biases = t[f"{v}head.attention.in_proj_bias"].chunk(3)
        probe = t[f"{v}head.probe"].expand(len(x), -1, -1)
        q, k, w = (
            F.linear(one, weight, bias)
            for one, weight, bias in zip((probe, x, x), weights, biases, strict=True)
        )
        x = linear(t, crossed(q, k, w), f"{v}head.attention.out_proj")
        hidden = tanh_gelu(linear(t, norm(t, x, f"{v}head.layernorm", 1e-6), f"{v}head.mlp.fc1"))
        return (x + linear(t, hidden, f"{v}head.mlp.fc2"))[:, 0]

    kind = {"pooling": "attention", "activation": "tanh-gelu"}
    return Tower(tensors=t, forward=forward, kind=kind)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def siglip_in_timm() -> Tower:
    blocks = replace(TIMM, activate=tanh_gelu)
    shapes = blocks.shapes() | embedding("patch_embed.proj") | norm_shapes("norm")
    shapes |= norm_shapes("attn_pool.norm") | linear_shapes("attn_pool.q", WIDTH, WIDTH)
    shapes |= linear_shapes("attn_pool.kv", 2 * WIDTH, WIDTH)
    shapes |= linear_shapes("attn_pool.proj", WIDTH, WIDTH)
    shapes |= linear_shapes("attn_pool.mlp.fc1", 128, WIDTH)
    shapes |= linear_shapes("attn_pool.mlp.fc2", WIDTH, 128)
    t = drawn({**shapes, "pos_embed": (1, 16, WIDTH), "attn_pool.latent": (1, 1, WIDTH)})

    def forward(images: Tensor) -> Tensor:
        x = blocks(t, patches(t, images, "patch_embed.proj") + t["pos_embed"])
        x = norm(t, x, "norm", 1e-6)
        q = linear(t, t["attn_pool.latent"].expand(len(x), -1, -1), "attn_pool.q")
        k, v = linear(t, x, "attn_pool.kv").chunk(2, dim=-1)
        x = linear(t, crossed(q, k, v), "attn_pool.proj")
        hidden = tanh_gelu(linear(t, norm(t, x, "attn_pool.norm", 1e-6), "attn_pool.mlp.fc1"))
        return (x + linear(t, hidden, "attn_pool.mlp.fc2"))[:, 0]

    kind = {"pooling": "attention", "activation": "tanh-gelu"}
    return Tower(tensors=t, forward=forward, kind=kind)


def turned_by_halves(angles: Tensor, *, before: int) -> Callable[[Tensor], Tensor]:
    cos, sin = torch.cos(angles).tile(2), torch.sin(angles).tile(2)

    def turn(x: Tensor) -> Tensor:
        rest, own = x[:, :, :before], x[:, :, before:]
        left, right = own.chunk(2, dim=-1)
        return torch.cat((rest, own * cos + torch.cat((-right, left), dim=-1) * sin), dim=2)

    return turn


def dinov3(*, gated: bool = False, size: int = 224) -> Tower:
    """transformers: no position embeddings, rotary positions by halves, registers."""
    blocks = Blocks(
        here="layer.{}.",
        norms=("norm1", "norm2"),
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        biased=(True, False, True),
        out="attention.o_proj",
        widen=("mlp.gate_proj", "mlp.up_proj") if gated else ("mlp.up_proj",),
        narrow="mlp.down_proj",
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        activate=swiglu if gated else F.gelu,
        eps=1e-5,
    )
    shapes = blocks.shapes() | embedding("embeddings.patch_embeddings") | norm_shapes("norm")
    t = drawn(
        {
            **shapes,
            "embeddings.cls_token": (1, 1, WIDTH),
            "embeddings.mask_token": (1, 1, WIDTH),
            "embeddings.register_tokens": (1, 4, WIDTH),
        }
    )

    def forward(images: Tensor) -> Tensor:
        x = patches(t, images, "embeddings.patch_embeddings")
        side = images.shape[-1] // PATCH
        middle = 2 * (torch.arange(side) + 0.5) / side - 1
        y, x_axis = torch.meshgrid(middle, middle, indexing="ij")
        places = torch.stack((y, x_axis), dim=-1).flatten(0, 1)
        own = WIDTH // HEADS
        frequency = 1 / 100.0 ** torch.arange(0, 1, 4 / own)
        angles = (2 * math.pi * places[:, :, None] * frequency).flatten(1)
        x = before(x, t["embeddings.cls_token"], t["embeddings.register_tokens"])
        x = blocks(t, x, turn=turned_by_halves(angles, before=5))
        return norm(t, x, "norm", 1e-5)[:, 0]

    kind = {"registers": 4, "rotary": True, **({"activation": "swiglu"} if gated else {})}
    return Tower(
        tensors=t,
        forward=forward,
        config={"image_size": size, "rope_theta": 100.0, "hidden_act": "silu" if gated else "gelu"},
        kind=kind,
        mean=IMAGENET,
        image_size=size,
    )


def turned_by_pairs(x: Tensor) -> Tensor:
    """Turn the patches of EVA-02: on a grid of 16, in neighbouring pairs of channels."""
    side, own = math.isqrt(x.shape[2] - 1), x.shape[-1]
    frequency = 1 / 10_000.0 ** (torch.arange(own // 4) / (own // 4))
    line = torch.arange(side) / side * 16
    y, x_axis = torch.meshgrid(line, line, indexing="ij")
    angles = torch.cat([(axis.flatten()[:, None] * frequency) for axis in (y, x_axis)], dim=-1)
    cos, sin = (f(angles).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin))
    rest, patch = x[:, :, :1], x[:, :, 1:]
    crossed = torch.stack((-patch[..., 1::2], patch[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((rest, patch * cos + crossed * sin), dim=2)


def eva02() -> Tower:
    """timm: SwiGLU, rotary positions in neighbouring pairs, the mean of the patches."""
    blocks = replace(TIMM, biased=(False,), activate=swiglu, hidden=170)
    extra: Shapes = {"pos_embed": (1, 17, WIDTH)}
    for number in range(DEPTH):
        extra |= {f"blocks.{number}.attn.{part}_bias": (WIDTH,) for part in "qv"}
    t = timm_tower(blocks, norm_shapes("fc_norm") | extra)

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"]) + t["pos_embed"]
        return norm(t, blocks(t, x, turn=turned_by_pairs)[:, 1:].mean(dim=1), "fc_norm", 1e-6)

    kind = {"rotary": True, "activation": "swiglu", "pooling": "mean"}
    return Tower(tensors=t, forward=forward, kind=kind, mean=OPENAI)


def eva02_base() -> Tower:
    """timm: EVA-02 with layers apart, and a norm inside the hidden layer."""
    blocks = replace(
        TIMM,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        biased=(True, False, True),
        widen=("mlp.fc1_g", "mlp.fc1_x"),
        activate=swiglu,
        inner="mlp.norm",
        hidden=170,
    )
    t = timm_tower(blocks, norm_shapes("fc_norm") | {"pos_embed": (1, 17, WIDTH)})

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"]) + t["pos_embed"]
        x = blocks(t, x, turn=turned_by_pairs)
        return norm(t, x[:, 1:].mean(dim=1), "fc_norm", 1e-6)

    kind = {"rotary": True, "activation": "swiglu", "pooling": "mean", "hidden_norm": 170}
    return Tower(tensors=t, forward=forward, kind=kind, mean=OPENAI)


def normed_queries() -> Tower:
    """timm: a norm on the queries and keys of each head."""
    extra: Shapes = {"pos_embed": (1, 17, WIDTH)}
    for number in range(DEPTH):
        norms = (f"blocks.{number}.attn.{part}_norm" for part in "qk")
        extra |= norm_shapes(*norms, width=WIDTH // HEADS)
    t = timm_tower(TIMM, norm_shapes("norm") | extra)

    def forward(images: Tensor) -> Tensor:
        x = before(patches(t, images, "patch_embed.proj"), t["cls_token"]) + t["pos_embed"]
        for b in (f"blocks.{number}." for number in range(DEPTH)):
            qkv = linear(t, norm(t, x, f"{b}norm1", 1e-6), f"{b}attn.qkv")
            q, k, v = (one.unflatten(-1, (HEADS, -1)) for one in qkv.chunk(3, dim=-1))
            q = norm(t, q, f"{b}attn.q_norm", 1e-6)
            k = norm(t, k, f"{b}attn.k_norm", 1e-6)
            read = crossed(q.flatten(2), k.flatten(2), v.flatten(2))
            x = x + linear(t, read, f"{b}attn.proj")
            hidden = F.gelu(linear(t, norm(t, x, f"{b}norm2", 1e-6), f"{b}mlp.fc1"))
            x = x + linear(t, hidden, f"{b}mlp.fc2")
        return beside(norm(t, x, "norm", 1e-6))

    return Tower(tensors=t, forward=forward, kind={"qk_norm": True, "pooling": "token-and-mean"})


TOWERS: dict[str, Callable[[], Tower]] = {
    "timm DINOv2 with registers": dinov2_with_registers,
    "DINOv2 giant": dinov2_giant,
    "timm DeiT III": deit_iii,
    "timm DeiT distilled": deit_distilled,
    "transformers ViT": hugging_face_vit,
    "transformers DINOv2 with registers": hugging_face_dinov2,
    "transformers CLIP": clip,
    "timm CLIP": clip_in_timm,
    "transformers SigLIP": siglip,
    "timm SigLIP": siglip_in_timm,
    "transformers DINOv3": lambda: dinov3(size=16),
    "transformers DINOv3 gated": lambda: dinov3(gated=True, size=16),
    "timm EVA-02": eva02,
    "timm EVA-02 base": eva02_base,
    "timm with norms of queries and keys": normed_queries,
}
