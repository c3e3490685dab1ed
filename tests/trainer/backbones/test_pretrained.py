"""A vision transformer in a file becomes an expert, and nothing else does."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model_store.errors import DataRejected, WrongUsage
from model_store.network.network import Network
from model_store.spec import TaskSpec
from tests.trainer.vit import REAL, REAL_DINOV2, made_up, resampled, slice_of, write_vit
from trainer.backbones.pretrained import Pretrained, read_pretrained
from trainer.backbones.shapes import HALF, IMAGENET

TOLERANCE = 1e-4

Tensors = dict[str, Tensor]


def token_of(pretrained: Pretrained, images: Tensor) -> Tensor:
    """What our network makes of the images with these weights."""
    geometry = replace(pretrained.geometry, image_size=images.shape[-1])
    network = Network(geometry)
    network.expand(TaskSpec(name="first", classes=("a",), expert=pretrained.expert))
    pretrained.load_into(network.newest, geometry=geometry)
    with torch.no_grad():
        (slice_BC,) = network.token_slices(images)
    return slice_BC


def pictures(size: int, *, count: int = 3) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("tensors", "heads"),
    [
        (made_up(), 2),
        (made_up(width=192, depth=3, mlp_ratio=4), 3),
        (made_up(width=96, image_size=12, qkv_bias=False, classes=0), 3),
        (made_up(patch_size=8, image_size=16), 2),
        (made_up(layer_scale=True), 2),
    ],
)
def test_our_forward_is_that_of_the_file(tmp_path: Path, tensors: Tensors, heads: int) -> None:
    pretrained = read_pretrained(write_vit(tmp_path / "vit", tensors))
    images = pictures(pretrained.geometry.image_size)
    expected = slice_of(tensors, images, heads=heads)
    assert (token_of(pretrained, images) - expected).abs().max() < TOLERANCE
    assert expected.abs().max() > 0.1  # not a comparison of zeros


@pytest.mark.skipif(not REAL.exists(), reason=f"SKIPPED: no {REAL.name} in shared/data")
@pytest.mark.parametrize("size", [224, 96])
def test_our_forward_is_that_of_a_real_file(size: int) -> None:
    tensors = load_file(REAL)
    images = pictures(size, count=2)
    if size != 224:
        tensors["pos_embed"] = resampled(tensors["pos_embed"], side=size // 16)
    expected = slice_of(tensors, images, heads=3)
    pretrained = read_pretrained(REAL)
    assert pretrained.geometry.image_size == 224
    assert (token_of(pretrained, images) - expected).abs().max() < TOLERANCE


@pytest.mark.skipif(not REAL_DINOV2.exists(), reason=f"SKIPPED: no {REAL_DINOV2.name}")
def test_our_forward_is_that_of_a_real_dinov2() -> None:
    tensors = {name: one.float() for name, one in load_file(REAL_DINOV2).items()}
    pretrained = read_pretrained(REAL_DINOV2)
    assert (pretrained.geometry.image_size, pretrained.geometry.patch_size) == (224, 14)
    assert pretrained.normalisation == IMAGENET
    tensors["pos_embed"] = resampled(tensors["pos_embed"], side=16)
    expected = slice_of(tensors, pictures(224, count=2), heads=6)
    assert (token_of(pretrained, pictures(224, count=2)) - expected).abs().max() < TOLERANCE


def test_the_normalisation_is_the_custom_of_the_family(tmp_path: Path) -> None:
    for layer_scale, custom in ((False, HALF), (True, IMAGENET)):
        tensors = made_up(layer_scale=layer_scale)
        path = write_vit(tmp_path / str(layer_scale), tensors)
        assert read_pretrained(path).normalisation == custom


def test_positions_for_518_pixels_are_used_for_224(tmp_path: Path) -> None:
    """DINOv2 files are: other files keep their own size."""
    for layer_scale, size in ((False, 518), (True, 224)):
        tensors = made_up(image_size=518, patch_size=14, layer_scale=layer_scale)
        pretrained = read_pretrained(write_vit(tmp_path / str(size), tensors))
        assert pretrained.geometry.image_size == size


def test_a_token_of_hidden_patches_makes_no_difference(tmp_path: Path) -> None:
    tensors = made_up(layer_scale=True) | {"mask_token": torch.ones(1, 64)}
    assert "mask_token" not in read_pretrained(write_vit(tmp_path / "vit", tensors)).tensors


@pytest.mark.parametrize("size", [4, 12, 20])
def test_position_embeddings_are_had_for_any_image_size(tmp_path: Path, size: int) -> None:
    tensors = made_up(image_size=8, patch_size=4)
    pretrained = read_pretrained(write_vit(tmp_path / "vit", tensors))
    elsewhere = {**tensors, "pos_embed": resampled(tensors["pos_embed"], side=size // 4)}
    expected = slice_of(elsewhere, pictures(size), heads=2)
    assert (token_of(pretrained, pictures(size)) - expected).abs().max() < TOLERANCE


def test_the_sizes_are_read_from_the_tensors(tmp_path: Path) -> None:
    tensors = made_up(width=192, depth=3, image_size=24, patch_size=8, mlp_ratio=4, qkv_bias=False)
    pretrained = read_pretrained(write_vit(tmp_path / "vit", tensors))
    geometry, expert = pretrained.geometry, pretrained.expert
    assert (geometry.image_size, geometry.patch_size, geometry.depth) == (24, 8, 3)
    assert (geometry.mlp_ratio, geometry.qkv_bias, geometry.head_width) == (4, False, 32)
    assert (expert.heads, expert.attention_heads) == (6, 3)


def test_how_attention_is_cut_can_be_said(tmp_path: Path) -> None:
    tensors = made_up(width=64)
    path = write_vit(tmp_path / "vit", tensors)
    pretrained = read_pretrained(path, attention_heads=4)
    expected = slice_of(tensors, pictures(8), heads=4)
    assert (token_of(pretrained, pictures(8)) - expected).abs().max() < TOLERANCE
    with pytest.raises(WrongUsage, match=r"`attention_heads=5`: the 64 channels .* cannot be cut"):
        read_pretrained(path, attention_heads=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_point_numbers_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: one.to(dtype) for name, one in made_up().items()}
    pretrained = read_pretrained(write_vit(tmp_path / "vit", tensors))
    expected = slice_of({name: one.float() for name, one in tensors.items()}, pictures(8), heads=2)
    assert (token_of(pretrained, pictures(8)) - expected).abs().max() < TOLERANCE


def test_a_classification_head_makes_no_difference(tmp_path: Path) -> None:
    with_head, without = made_up(classes=7), made_up(classes=0)
    read = [
        read_pretrained(write_vit(tmp_path / str(len(one)), {**made_up(classes=0), **one}))
        for one in (with_head, without)
    ]
    assert read[0].tensors.keys() == read[1].tensors.keys()
    assert read[0].sha256 != read[1].sha256


def changed(change: Callable[[Tensors], object]) -> Tensors:
    tensors = made_up()
    change(tensors)
    return tensors


def with_nan(tensors: Tensors) -> None:
    tensors["blocks.1.mlp.fc1.bias"][3] = float("nan")


def huge_in_float16(tensors: Tensors) -> None:
    tensors["norm.bias"] = torch.full((64,), 1e300, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"model.layers.0.weight": torch.zeros(2, 2)},
            "expected one of patch_embed.proj.weight, .*, and none is among model.layers.0.weight",
        ),
        ({}, "none is among no tensors"),
        (
            changed(lambda t: t.pop("cls_token")),
            r"expected cls_token \[1, 1, 64\], which is missing",
        ),
        (changed(lambda t: t.pop("norm.bias")), r"expected norm.bias \[64\], which is missing"),
        (
            changed(lambda t: t.pop("blocks.0.mlp.fc2.weight")),
            "expected blocks.0.mlp.fc2.weight with 2 dimensions, and it is not among blocks.0",
        ),
        (
            changed(lambda t: t.update({"blocks.1.attn.proj.weight": torch.zeros(64, 32)})),
            r"expected blocks.1.attn.proj.weight \[64, 64\] of F64, F32, F16, BF16, "
            r"found F32 \[64, 32\]",
        ),
        (
            changed(lambda t: t.update({"norm.weight": torch.zeros(64, dtype=torch.int64)})),
            r"expected norm.weight \[64\] of .*, found I64 \[64\]",
        ),
        (
            changed(lambda t: t.update({"pos_embed": torch.zeros(1, 7, 64)})),
            "expected pos_embed for a square of patches and one class token, found 7 positions",
        ),
        (
            changed(lambda t: t.update({"pos_embed": torch.zeros(1, 0, 64)})),
            "found 0 positions",
        ),
        (made_up(width=48), "expected a multiple of 32 channels, found 48"),
        (
            changed(lambda t: t.update({"blocks.0.mlp.fc1.weight": torch.zeros(100, 64)})),
            r"expected blocks.0.mlp.fc1.weight \[128, 64\] of .*, found F32 \[100, 64\]",
        ),
        (
            changed(lambda t: t.update({"blocks.0.ls1.gamma": torch.zeros(64)})),
            r"expected blocks.0.ls2.gamma \[64\], which is missing",
        ),
        (
            changed(lambda t: t.update({"blocks.1.ls1.gamma": torch.zeros(64)})),
            "not a vision transformer of a known family: found blocks.1.ls1.gamma",
        ),
        (
            changed(lambda t: t.update({"reg_token": torch.zeros(4, 64)})),
            r"expected reg_token \[1, 0, 64\] of .*, found F32 \[4, 64\]",
        ),
        (
            changed(lambda t: t.update({"blocks.9999.norm1.weight": torch.zeros(64)})),
            "expected blocks.2.norm1.weight",
        ),
        (
            changed(lambda t: t.update({"patch_embed.proj.weight": torch.zeros(64, 1, 4, 4)})),
            r"expected patch_embed.proj.weight \[64, 3, 4, 4\]",
        ),
        (changed(with_nan), "blocks.1.mlp.fc1.bias holds a value that is not finite"),
        (changed(huge_in_float16), "norm.bias holds a value that is not finite in float32"),
    ],
)
def test_a_file_that_is_something_else_is_told_what_was_expected_and_found(
    tmp_path: Path, tensors: Tensors, sentence: str
) -> None:
    path = write_vit(tmp_path / "odd.safetensors", tensors)
    with pytest.raises(DataRejected, match=sentence) as refused:
        read_pretrained(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2 << 20) + b" " * (2 << 20),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.tensors"
    path.write_bytes(data)
    with pytest.raises(
        DataRejected, match=r"model.tensors is not a safetensors file of weights: it"
    ):
        read_pretrained(path)


def test_names_that_are_no_text_are_shown_harmlessly(tmp_path: Path) -> None:
    path = write_vit(tmp_path / "vit", {**made_up(), "\x1b[31m" + "x" * 500: torch.zeros(1)})
    with pytest.raises(DataRejected, match="found ") as refused:
        read_pretrained(path)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(WrongUsage, match=r"`pretrained=.*` is not a file"):
            read_pretrained(path)
