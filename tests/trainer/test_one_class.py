"""The smallest tasks: one class, few images, from the command to the answers of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from tests.live_server import Live, live_server
from tests.trainer.command import Command
from tests.trainer.folders import write_classes
from tests.trainer.vit import write_vit


def answered(live: Live, images: list[bytes]) -> list[tuple[str, float]]:
    answer = live.predict(*images)
    assert answer.status_code == 200, answer.text
    return [(one["label"], one["score"]) for one in answer.json()["predictions"]]


def test_a_class_alone_is_learnt_served_extended_and_joined_by_another(
    dne_train: Command, tmp_path: Path
) -> None:
    cats = write_classes(tmp_path / "cats", ["cat"], images=24)
    pictures = [path.read_bytes() for path in sorted((cats / "cat").iterdir())[:2]]
    assert dne_train.add(cats, "--json") == 0
    assert json.loads(dne_train.out)["new_classes"] == ["cat"]
    assert "every image will be answered 'cat'" in dne_train.err
    torch_engine = TorchEngine(device="cpu", threads=1)
    onnx_engine = OnnxEngine(device="cpu", threads=1)
    store = dne_train.store
    with (
        live_server(store, engine=torch_engine, poll_seconds=0.2) as by_torch,
        live_server(store, engine=onnx_engine, poll_seconds=0.2) as by_onnx,
    ):
        for live in (by_torch, by_onnx):
            live.wait_until_serving(1)
            assert answered(live, pictures) == [("cat", 1.0), ("cat", 1.0)]
        more = write_classes(tmp_path / "more", ["cat"], images=30)
        assert dne_train("add-task", "--extend", "--data", more, "--epochs", 1) == 0
        dogs = write_classes(tmp_path / "dogs", ["dog"])
        assert dne_train.add(dogs) == 0
        assert "every image will be answered" not in dne_train.err
        for live in (by_torch, by_onnx):
            live.wait_until_serving(3)
        expected, found = (dict(answered(live, pictures[:1])) for live in (by_torch, by_onnx))
        assert found == pytest.approx(expected, abs=1e-4)
    assert dne_train("report", 1, "--out", tmp_path / "report") == 0


def test_a_class_alone_may_follow_a_pre_trained_start(dne_train: Command, tmp_path: Path) -> None:
    vit = write_vit(tmp_path / "vit.safetensors")
    cats = write_classes(tmp_path / "cats", ["cat"])
    assert dne_train("add-task", "--data", cats, "--pretrained", vit) == 0
    dogs = write_classes(tmp_path / "dogs", ["dog"])
    assert dne_train("add-task", "--data", dogs, "--epochs", 1) == 0
    assert dne_train.versions == [1, 2]


@pytest.mark.parametrize("classes", [["cat"], ["cat", "dog"]])
def test_one_image_a_class_is_refused_before_learning(
    dne_train: Command, tmp_path: Path, classes: list[str]
) -> None:
    data = write_classes(tmp_path / "data", classes, images=1)
    assert dne_train.add(data) == 1
    assert "'cat' has 1 image" in dne_train.err
    assert "a class needs at least 2" in dne_train.err
    assert "learning" not in dne_train.err
