"""The options of a pre-trained start, as the command line takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_store.codec import load_network
from model_store.inference.forward import FoldedNetwork
from model_store.store.store import Store
from tests.trainer.command import Command
from tests.trainer.towers import TOWERS, write_tower
from tests.trainer.vit import write_vit


def test_a_store_may_begin_with_a_pre_trained_file(
    dne_train: Command, letters: Path, digits: Path, tmp_path: Path
) -> None:
    vit = write_vit(tmp_path / "vit.safetensors")
    begin = ("add-task", "--data", letters, "--pretrained", vit, "--normalise", "imagenet")
    assert dne_train(*begin, "--json") == 0
    assert "2 blocks, 64 channels, 2 attention heads, images of 8 pixels" in dne_train.err
    assert json.loads(dne_train.out)["version"] == 1
    assert dne_train("add-task", "--data", digits, "--pretrained", vit) == 2
    assert "--pretrained is for the first task of a store" in dne_train.err
    assert dne_train("add-task", "--data", digits, "--epochs", 1) == 0
    assert dne_train.versions == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    ["transformers SigLIP", "transformers DINOv3 gated", "timm EVA-02", "timm CLIP"],
)
def test_a_lineage_begins_with_any_family_and_goes_on(
    dne_train: Command, letters: Path, digits: Path, tmp_path: Path, family: str
) -> None:
    """The first slice of both versions is that of the file, after the way through the store."""
    tower = TOWERS[family]()
    path = write_tower(tmp_path / "file", tower)
    assert dne_train("add-task", "--data", letters, "--pretrained", path) == 0, dne_train.err
    further = ("add-task", "--data", digits, "--no-quick", "--epochs", 1, "--force")
    assert dne_train(*further) == 0, dne_train.err
    store = Store.open(str(dne_train.store))
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    for version in dne_train.versions:
        manifest = store.manifest(version)
        assert manifest.preprocessing.mean == tower.mean
        network = load_network(store.read_shard, manifest)
        first = network.token_slices(images)[0]
        assert (first - tower.forward(images)).abs().max() < 1e-4
        folded = FoldedNetwork.of(network)(images)
        assert torch.allclose(folded, network(images), rtol=1e-4, atol=1e-4)
    assert len(manifest.experts) == 2
    assert dne_train("evaluate", "--data", letters, "--json") == 0, dne_train.err


def test_the_last_blocks_of_a_pooled_backbone_may_learn(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    tower = TOWERS["transformers SigLIP"]()
    path = write_tower(tmp_path / "file", tower)
    begin = ("add-task", "--data", letters, "--pretrained", path, "--unfreeze-last", 1)
    assert dne_train(*begin, "--epochs", 1) == 0, dne_train.err
    store = Store.open(str(dne_train.store))
    network = load_network(store.read_shard, store.manifest(1))
    state = network.experts[0].state_dict()
    probe = tower.tensors["vision_model.head.probe"].flatten()
    fixed = tower.tensors["vision_model.encoder.layers.0.mlp.fc2.bias"]
    learnt = tower.tensors["vision_model.encoder.layers.1.mlp.fc2.bias"]
    pooling = tower.tensors["vision_model.head.mlp.fc2.bias"]
    assert torch.equal(state["token"], probe)
    assert torch.equal(state["blocks.0.narrow.bias"], fixed)
    assert not torch.equal(state["blocks.1.narrow.bias"], learnt)
    assert not torch.equal(state["class_block.narrow.bias"], pooling)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--unfreeze-last", "1"), "--unfreeze-last is about a pre-trained file"),
        (("--normalise", "half"), "--normalise is about a pre-trained file"),
        (("--attention-heads", "3"), "--attention-heads is about a pre-trained file"),
        (("--pretrained", "nowhere.safetensors"), "nowhere.safetensors is not a file"),
        (("--pretrained", "vit.safetensors", "--unfreeze-last", "-1"), "must be 0 or more"),
        (("--pretrained", "vit.safetensors", "--preset", "small"), "--preset small does not go"),
    ],
)
def test_wrong_usage_of_pre_trained_files(
    dne_train: Command,
    letters: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_vit(tmp_path / "vit.safetensors")
    assert dne_train("add-task", "--data", letters, *options) == 2
    assert sentence in dne_train.err
    assert dne_train.versions == []


def test_a_pre_trained_file_that_is_something_else_fails(
    dne_train: Command, letters: Path, tmp_path: Path
) -> None:
    odd = write_vit(tmp_path / "odd.safetensors", {"weight": torch.zeros(2)})
    assert dne_train("add-task", "--data", letters, "--pretrained", odd) == 1
    assert "expected one of patch_embed.proj.weight" in dne_train.err
    assert dne_train.versions == []
