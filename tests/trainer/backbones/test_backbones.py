"""The usual families of vision transformers become first experts that compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_store.errors import DataRejected
from model_store.inference.forward import FoldedNetwork, Lineage
from model_store.network.network import Network
from model_store.onnx.model import weights_of
from model_store.onnx.session import Session
from model_store.spec import Backbone, ExpertSpec, TaskSpec
from tests.trainer.tower_blocks import Tensors
from tests.trainer.towers import (
    TOWERS,
    Tower,
    clip,
    dinov3,
    hugging_face_vit,
    siglip,
    write_tower,
)
from tests.trainer.vit import made_up, resampled, write_vit
from trainer.backbones.pretrained import Pretrained, read_pretrained

TOLERANCE = 1e-4


def network_of(pretrained: Pretrained, *, size: int, younger: tuple[int, ...] = ()) -> Network:
    geometry = replace(pretrained.geometry, image_size=size)
    torch.manual_seed(0)
    network = Network(geometry)
    network.expand(TaskSpec(name="first", classes=("a", "b"), expert=pretrained.expert))
    pretrained.load_into(network.newest, geometry=geometry)
    for heads in younger:
        name = f"{len(network.spec.tasks)}"
        network.expand(TaskSpec(name=name, classes=(name,), expert=ExpertSpec(heads=heads)))
        with torch.no_grad():
            for parameter in network.newest.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval().requires_grad_(False)


def pictures(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=TOWERS, ids=lambda name: name.replace(" ", "-"))
def tower(request: pytest.FixtureRequest) -> Tower:
    return TOWERS[request.param]()


def test_the_slice_is_that_of_the_family(tmp_path: Path, tower: Tower) -> None:
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    assert pretrained.geometry.image_size == tower.image_size
    assert pretrained.geometry.first == Backbone(**tower.kind)  # type: ignore[arg-type]
    assert pretrained.normalisation[0] == tower.mean
    images = pictures(16)
    (found,) = network_of(pretrained, size=16).token_slices(images)
    expected = tower.forward(images)
    assert (found - expected).abs().max() < TOLERANCE
    assert expected.abs().max() > 0.1  # not a comparison of zeros


def test_all_forms_of_the_network_agree(tmp_path: Path, tower: Tower) -> None:
    """With younger experts of one head and of two, which read the backbone."""
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    network, images = network_of(pretrained, size=16, younger=(1, 1, 2)), pictures(16)
    expected = network(images)
    folded = FoldedNetwork.of(network)
    assert (folded(images) - expected).abs().max() < 1e-5 * expected.abs().max()
    session = Session(weights_of(network), threads=1)
    assert np.abs(session(images.numpy()) - expected.numpy()).max() < 1e-4
    coarse = Session(weights_of(network, precision="int8"), threads=1)(images.numpy())
    assert np.abs(coarse - expected.numpy()).max() < 0.2 * float(expected.abs().max())


@pytest.mark.parametrize("younger", [(2,), (1, 2)])
def test_an_expert_learns_the_same_from_the_folded_backbone(
    tmp_path: Path, tower: Tower, younger: tuple[int, ...]
) -> None:
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    network, images = network_of(pretrained, size=16, younger=younger), pictures(16)
    frozen = Lineage.of(network, experts=len(younger)).frozen_context(images)
    older, newest = network.token_slices(images, frozen)
    *before, expected = network.token_slices(images)
    assert (older - torch.cat(before, dim=-1)).abs().max() < 1e-5 * older.abs().max()
    assert (newest - expected).abs().max() < 1e-5 * newest.abs().max()


def test_products_in_16_bits_stay_close(tmp_path: Path, tower: Tower) -> None:
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    network, images = network_of(pretrained, size=16, younger=(1,)), pictures(16)
    expected = network(images)
    rounded = FoldedNetwork.of(network, matmul_dtype=torch.bfloat16)(images)
    assert (rounded - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("size", [8, 24])
def test_rotary_positions_fit_any_image_size(tmp_path: Path, size: int) -> None:
    tower = dinov3()
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    (found,) = network_of(pretrained, size=size).token_slices(pictures(size))
    assert (found - tower.forward(pictures(size))).abs().max() < TOLERANCE


def test_positions_of_patches_alone_are_resized(tmp_path: Path) -> None:
    tower, name = siglip(), "vision_model.embeddings.position_embedding.weight"
    pretrained = read_pretrained(write_tower(tmp_path, tower))
    (found,) = network_of(pretrained, size=24).token_slices(pictures(24))
    token = torch.zeros(1, 1, 64)
    grid = resampled(torch.cat((token, tower.tensors[name][None]), dim=1), side=6)
    tower.tensors[name] = grid[0, 1:]
    assert (found - tower.forward(pictures(24))).abs().max() < TOLERANCE


def test_registers_are_shown_to_no_younger_expert(tmp_path: Path) -> None:
    tower = TOWERS["timm DINOv2 with registers"]()
    network = network_of(read_pretrained(write_tower(tmp_path, tower)), size=16, younger=(1,))
    context = Lineage.of(network, experts=1).frozen_context(pictures(16))
    assert {one.normed.shape[1] for one in context.blocks[:-1]} == {17}
    assert network.experts[0].position.shape == (21, 64)
    assert network.experts[1].position.shape == (17, 32)


def test_an_index_names_the_files_of_the_tensors(tmp_path: Path) -> None:
    tower = hugging_face_vit()
    whole = read_pretrained(write_tower(tmp_path / "whole", tower))
    parts = write_sharded(tmp_path / "parts", tower)
    sharded = read_pretrained(parts)
    assert whole.tensors.keys() == sharded.tensors.keys()
    assert all(torch.equal(one, sharded.tensors[name]) for name, one in whole.tensors.items())
    assert sharded.sha256 != whole.sha256
    changed = {name: one + 1 for name, one in tower.tensors.items()}
    write_sharded(tmp_path / "parts", replace(tower, tensors=changed))
    assert read_pretrained(parts).sha256 != sharded.sha256  # the digest covers all files


def write_sharded(folder: Path, tower: Tower) -> Path:
    write_tower(folder, tower).unlink()
    names = sorted(tower.tensors)
    files = {
        name: f"model-0000{number % 2 + 1}-of-00002.safetensors"
        for number, name in enumerate(names)
    }
    for file in set(files.values()):
        own = {name: tower.tensors[name].contiguous() for name in names if files[name] == file}
        save_file(own, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def without_file(index: Path) -> None:
    (index.parent / "model-00002-of-00002.safetensors").unlink()


def rewrite(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def rewritten(index: Path) -> None:
        body = json.loads(index.read_text())
        change(body["weight_map"])
        index.write_text(json.dumps(body))

    return rewritten


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_file, "names model-00002-of-00002.safetensors, and there is no such file beside"),
        (lambda index: index.write_text("{"), "is not JSON"),
        (lambda index: index.write_text("[]"), "is not a JSON object"),
        (lambda index: index.write_text("{}"), "it has no weight_map"),
        (
            lambda index: index.write_text('{"weight_map": {"a": 3}}'),
            "names 3, which is not a file",
        ),
        (rewrite(lambda m: m.update(x="../secret.safetensors")), "which is not a file beside it"),
        (rewrite(lambda m: m.update(x="/etc/passwd")), "which is not a file beside it"),
        (rewrite(lambda m: m.update(x="pytorch_model-00001.bin")), "is a pickle"),
        (
            rewrite(lambda m: m.update(x="model-00001-of-00002.safetensors")),
            "x is not in model-00001-of-00002.safetensors",
        ),
    ],
)
def test_an_index_that_is_wrong_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    index = write_sharded(tmp_path / "parts", hugging_face_vit())
    spoil(index)
    with pytest.raises(DataRejected, match=sentence):
        read_pretrained(index)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "vit.pt", "vit.PTH", "vit.ckpt"])
def test_a_pickle_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = write_vit(tmp_path / name)
    with pytest.raises(DataRejected, match="is a pickle, which can run programs"):
        read_pretrained(path)


@pytest.mark.parametrize("data", [b"PK\x03\x04 as torch.save writes", b"\x80\x02}q\x00."])
def test_a_pickle_is_refused_by_its_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataRejected, match="is a pickle"):
        read_pretrained(path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hidden_size": 768}, r"of a model with 768 channels, and .* has 64: put the file into"),
        ({"hidden_size": "large"}, "expected hidden_size to be a size from 1 to 65536"),
        ({"num_attention_heads": True}, "expected num_attention_heads to be a size"),
        ({"num_attention_heads": 7}, "cannot be cut into 7 attention heads"),
        ({"layer_norm_eps": 2}, "expected layer_norm_eps to be a number between 0 and 1, found 2"),
        ({"layer_norm_eps": float("nan")}, "expected layer_norm_eps to be a number above 0"),
        ({"hidden_act": "relu"}, "expected hidden_act to be one of gelu, quick_gelu"),
        ({"hidden_act": "silu"}, "expected a gate for hidden_act silu"),
        ({"pretrained_cfg": {"mean": [1, 2], "std": [1, 1, 1]}}, "expected mean to be three num"),
        ({"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 0, 1]}}, "std to be three numbers abo"),
        ({"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 1e-320, 1]}}, "std to be three num"),
        ({"pretrained_cfg": {"mean": [0, 0, 1e29], "std": [1, 1, 1]}}, "mean to be three num"),
        ({"layer_norm_eps": 1e-320}, "expected layer_norm_eps to be a number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, config: dict[str, object], sentence: str
) -> None:
    path = write_tower(tmp_path, replace(hugging_face_vit(), config=config))
    with pytest.raises(DataRejected, match=sentence) as refused:
        read_pretrained(path)
    assert "config.json" in str(refused.value)


def test_the_preprocessing_beside_the_file_gives_the_normalisation(tmp_path: Path) -> None:
    path = write_tower(tmp_path, hugging_face_vit())
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_resize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    assert read_pretrained(path).normalisation == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_the_settings_of_the_vision_tower_count(tmp_path: Path) -> None:
    """Beside those of the text tower, which may differ."""
    vision = {"hidden_size": 64, "hidden_act": "gelu", "num_attention_heads": 4}
    config = {"hidden_size": 999, "vision_config": vision}
    pretrained = read_pretrained(write_tower(tmp_path, replace(clip(), config=config)))
    assert pretrained.geometry.first.activation == "gelu"
    assert pretrained.expert.attention_heads == 4


def changed(tower: Tower, change: Callable[[Tensors], object]) -> Tensors:
    change(tower.tensors)
    return tower.tensors


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            changed(siglip(), lambda t: t.pop("vision_model.head.attention.in_proj_bias")),
            r"expected vision_model.head.attention.in_proj_bias \[192\], which is missing",
        ),
        (
            changed(
                hugging_face_vit(),
                lambda t: t.pop("vit.encoder.layer.1.attention.attention.key.weight"),
            ),
            r"attention.query.weight \+ .*key.weight \+ .* \[192, 64\], which is missing",
        ),
        (
            changed(clip(), lambda t: t.update({"vision_model.head.weight": torch.zeros(2)})),
            "found vision_model.head.weight, which would have no effect here",
        ),
        (
            made_up() | {"blocks.0.attn.relative_position_bias_table": torch.zeros(2, 2)},
            "found blocks.0.attn.relative_position_bias_table, which would have no effect here",
        ),
        (
            made_up() | {"blocks.0.mlp.norm.weight": torch.zeros(128)},
            r"expected blocks.0.mlp.norm.bias \[128\], which is missing",
        ),
        (
            made_up() | {"blocks.0.attn.q_norm.weight": torch.zeros(32)},
            "expected blocks.0.attn.q_norm.bias",
        ),
        (
            made_up() | {"blocks.0.attn.norm.weight": torch.zeros(64)},
            "found blocks.0.attn.norm.weight, which would have no effect here",
        ),
    ],
)
def test_an_unsupported_tensor_is_named(tmp_path: Path, tensors: Tensors, sentence: str) -> None:
    path = write_vit(tmp_path / "odd.safetensors", tensors)
    with pytest.raises(DataRejected, match=sentence):
        read_pretrained(path)
