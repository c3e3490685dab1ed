"""The options of a pre-trained start, as the command line takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainer.command import Command
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
    assert "expected patch_embed.proj.weight with 4 dimensions" in dne_train.err
    assert dne_train.versions == []
