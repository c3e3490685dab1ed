"""A store that began with a pre-trained file does everything that any other store does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from model_store.cli.main import main as dne_store
from model_store.codec import load_network
from model_store.preprocess import normalise
from model_store.store.store import Store
from tests.live_server import live_server
from tests.machine import know_machine, run_folder
from tests.trainer.folders import pixels_of, write_classes
from tests.trainer.vit import write_vit
from trainer.cli import main as dne_train

TASKS = {"letters": ["a", "b"], "digits": ["0", "1"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, learnt by the command: version 2 knows a, b, 0 and 1."""
    folder = tmp_path_factory.mktemp("story")
    vit = write_vit(folder / "vit.safetensors")
    location = folder / "models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        know_machine()
        for name, classes in TASKS.items():
            data = write_classes(folder / name, classes)
            begin = (
                ["--pretrained", str(vit), "--normalise", "imagenet"] if name == "letters" else []
            )
            arguments = ["add-task", "--data", str(data), "--store", str(location), *begin]
            assert dne_train([*arguments, "--epochs", "2", "--device", "cpu"]) == 0
    return location


def unseen(name: str) -> np.ndarray:
    return np.asarray(pixels_of(name, 1, seed=99)[0])


def png(name: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(unseen(name)).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_server_answers_with_every_version_of_it(store: Path) -> None:
    with live_server(store) as live:
        live.wait_until_ready()
        answers = live.predict(*(png(name) for name in ("a", "b", "0", "1"))).json()
        assert answers["version"] == 2
        assert [one["label"] for one in answers["predictions"]] == ["a", "b", "0", "1"]
        older = live.predict(png("b"), query="?version=1").json()
        assert (older["version"], older["predictions"][0]["label"]) == (1, "b")


def test_its_onnx_file_gives_the_same_logits(store: Path, tmp_path: Path) -> None:
    assert dne_store(["export-onnx", "2", "--out", str(tmp_path), "--store", str(store)]) == 0
    manifest = Store.open(str(store)).manifest(2)
    images = normalise(np.stack([unseen(name) for name in "ab01"]), manifest.preprocessing)
    session = onnxruntime.InferenceSession(str(tmp_path / "version-00000002.onnx"))
    (logits,) = session.run(["logits"], {"images": images})
    with torch.no_grad():
        expected = load_network(Store.open(str(store)).read_shard, manifest)(
            torch.from_numpy(images)
        )
    assert np.abs(logits - expected.numpy()).max() < 1e-4


def test_it_is_copied_verified_and_swept_like_any_other(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = str(tmp_path / "there")
    assert dne_store(["copy", "--to", there, "--store", str(store)]) == 0
    for command in (["verify"], ["gc"], ["verify"]):
        assert dne_store([*command, "--store", there]) == 0
    assert Store.open(there).manifest(2) == Store.open(str(store)).manifest(2)
    capsys.readouterr()
    assert dne_store(["show", "1", "--json", "--store", there]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["version"] == 1
    assert Store.open(there).manifest(1).preprocessing.mean == (0.485, 0.456, 0.406)


def test_a_class_is_retired_and_the_next_task_learnt_all_the_same(
    store: Path, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    data = write_classes(tmp_path / "signs", ["plus", "minus"])
    assert dne_store(["copy", "--to", there, "--store", str(store)]) == 0
    assert dne_store(["retire-class", "a", "--store", there]) == 0
    arguments = ["add-task", "--data", str(data), "--store", there, "--epochs", "1"]
    assert dne_train([*arguments, "--device", "cpu"]) == 0
    manifest = Store.open(there).manifest(4)
    assert manifest.classes == ("b", "0", "1", "minus", "plus")
    assert manifest.metrics.accuracy.all == 1.0


def test_its_report_is_written(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert dne_train(["report", "2", "--out", str(out), "--store", str(store)]) == 0
    assert json.loads((out / "report.json").read_text())["accuracy"]["all"] is not None
