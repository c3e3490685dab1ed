"""Unknown images by their tokens, from the commands to the answers of both backends."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from dne_serve.engines.choose import choose_engine
from model_store.cli.main import main as dne_store
from model_store.codec import load_doubt, load_network
from model_store.inference.doubt import none_of_these
from model_store.preprocess import normalise
from model_store.records.describe import change
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.v2_requests import image_tensor, infer
from tests.live_server import live_server
from tests.machine import know_machine, run_folder
from tests.trainer.folders import pixels_of, write_classes
from tests.trainer.vit import write_vit
from trainer.cli import main as dne_train

LETTERS, DIGITS = ["a", "b", "c", "d", "e"], ["0", "1"]
STRANGE = [f"strange {index}" for index in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models`: two tasks, learnt by the command on a pre-trained start."""
    folder = tmp_path_factory.mktemp("doubt")
    vit = write_vit(folder / "vit.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DNE_CACHE", str(run_folder(tmp_path_factory) / "cache"))
        know_machine()
        for name, classes in (("letters", LETTERS), ("digits", DIGITS)):
            data = write_classes(folder / name, classes, images=20)
            begin = ["--pretrained", str(vit)] if name == "letters" else []
            given = ["add-task", "--data", str(data), "--store", str(folder / "models"), *begin]
            assert dne_train([*given, "--epochs", "1", "--device", "cpu"]) in (0, 3)
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    return Store.open(str(shutil.copytree(made / "models", tmp_path / "models")))


def pixels(names: list[str]) -> np.ndarray:
    return np.stack([pixels_of(name, 1, seed=99)[0] for name in names])


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_with_few_images_the_threshold_stands_on_all_of_them(store: Store) -> None:
    first = store.manifest(1)
    assert first.unknown is not None
    assert first.metrics.images == 20
    assert first.unknown.images == 100
    assert first.unknown.scores is not None
    assert sum(first.unknown.scores.counts) == 100


NAMES = [*LETTERS, *DIGITS, *STRANGE]


def asked(store: Store, backend: str, version: int) -> list[dict[str, Any]]:
    engine = choose_engine(backend, device="cpu", threads=1, precision="fp32")
    with live_server(Path(store.location), engine=engine) as live:
        live.wait_until_ready()
        answer = live.predict(*map(png, pixels(NAMES)), query=f"?version={version}")
        shown = live.http.get(f"/versions/{version}").json()["unknown"]
    assert shown["score"] == "log-odds"
    found: list[dict[str, Any]] = answer.json()["predictions"]
    return found


def scores(answers: list[dict[str, Any]]) -> np.ndarray:
    return np.array([one["unknown_score"] for one in answers])


def expected(store: Store, manifest: Manifest) -> np.ndarray:
    """The probabilities by the reference network."""
    network, doubt = (
        load_network(store.read_shard, manifest),
        load_doubt(store.read_shard, manifest),
    )
    assert doubt is not None
    batch = torch.from_numpy(normalise(pixels(NAMES), manifest.preprocessing))
    with torch.inference_mode():
        token = torch.cat(network.token_slices(batch), dim=1).numpy()
    return np.array([none_of_these(float(one)) for one in doubt.log_odds(token)])


@pytest.mark.parametrize("version", [1, 2])
def test_both_backends_answer_the_probability_of_none_of_the_classes(
    store: Store, version: int
) -> None:
    manifest = store.manifest(version)
    assert manifest.unknown is not None
    torch_answers, onnx_answers = (asked(store, one, version) for one in ("torch", "onnx"))
    right = expected(store, manifest)
    np.testing.assert_allclose(scores(torch_answers), right, atol=1e-3)
    np.testing.assert_allclose(scores(onnx_answers), right, atol=1e-3)
    above = none_of_these(manifest.unknown.threshold)
    assert [one["unknown"] for one in torch_answers] == (right > above).tolist()
    known = [name in manifest.classes for name in NAMES]
    assert right[known].mean() < 0.3 < 0.6 < right[np.invert(known)].mean()


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_images_of_a_retired_class_become_unknown(store: Store, backend: str) -> None:
    place = NAMES.index("c")
    before = asked(store, backend, 2)
    options = ["--store", store.location, "--channel", "production"]
    assert dne_store(["promote", "2", *options]) == 0
    assert dne_store(["retire-class", "c", *options]) == 0
    after = asked(store, backend, 3)
    assert scores(before)[place] < 0.5 < scores(after)[place]
    assert (scores(after) >= scores(before) - 1e-6).all()
    retired, parent = store.manifest(3), store.manifest(2)
    assert retired.doubt == parent.doubt  # nothing is written
    np.testing.assert_allclose(scores(after), expected(store, retired), atol=1e-3)


def test_a_renamed_class_keeps_its_prototype(store: Store) -> None:
    options = ["--store", store.location, "--channel", "production"]
    assert dne_store(["promote", "2", *options]) == 0
    assert dne_store(["rename-class", "c", "sea", *options]) == 0
    np.testing.assert_array_equal(scores(asked(store, "onnx", 2)), scores(asked(store, "onnx", 3)))


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_a_class_is_refused_by_its_own_threshold_until_it_is_taken_back(
    store: Store, backend: str
) -> None:
    at = ["--store", store.location]
    assert dne_store(["promote", "2", *at]) == 0
    plain = asked(store, backend, 2)
    label = plain[0]["label"]
    mine = sorted(one["unknown_score"] for one in plain if one["label"] == label)
    for version, above in ((3, mine[0] / 2), (4, (mine[0] + mine[-1]) / 2)):
        assert dne_store(["threshold", label, str(above), *at]) == 0
        assert asked(store, backend, version) == [
            {**one, "unknown": one["unknown_score"] > above} if one["label"] == label else one
            for one in plain
        ]
    assert dne_store(["threshold", label, "fitted", *at]) == 0
    assert asked(store, backend, 5) == plain


def test_a_threshold_says_who_set_it_when_and_why_and_outlasts_learning(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--store", store.location]
    assert dne_store(["promote", "2", *at]) == 0
    assert dne_store(["threshold", "a", "30%", "b", "0.5", *at, "--reason", "mixed up"]) == 0
    assert dne_store(["rename-class", "a", "ä", *at]) == 0
    assert dne_store(["retire-class", "b", *at]) == 0
    more = write_classes(tmp_path / "more", DIGITS, images=6, seed=7)
    given = ["add-task", "--data", str(more), "--extend", "--force"]
    assert dne_train([*given, *at, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert dne_store(["threshold", *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], list(told["unknown"]["by_class"])) == (6, ["ä"])
    own = told["unknown"]["by_class"]["ä"]
    assert (own["above"], own["reason"]) == (0.3, "mixed up")
    before = store.manifest(3).unknown
    assert before is not None
    assert before.by_class["a"].model_dump() == own
    assert dne_store(["threshold", *at]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("ä", "30.0 %", own["actor"], "mixed up"))
    parents = [store.parent_of(store.manifest(number)) for number in (3, 4, 5)]
    said = [change(store.manifest(n), p) for n, p in zip((3, 4, 5), parents, strict=True)]
    assert said == ["set thresholds: a 30.0 %, b 50.0 %", "renamed a to ä", "retired b"]


@pytest.mark.parametrize(
    ("pairs", "code", "said"),
    [
        (["a"], 2, "has no threshold"),
        (["a", "much"], 2, "'much' is not a share: give 0.3, 30% or fitted"),
        (["a", "nan"], 2, "above"),
        (["a", "101%"], 2, "above"),
        (["a", "0.1", "a", "0.2"], 2, "name each class once"),
        (["nobody", "0.1"], 1, "knows no class 'nobody'"),
        (["c", "0.1"], 1, "'c' is retired"),
    ],
)
def test_a_threshold_that_cannot_be_set_publishes_nothing(
    store: Store,
    pairs: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = ["--store", store.location]
    assert dne_store(["promote", "2", *at]) == 0
    assert dne_store(["retire-class", "c", *at]) == 0
    assert dne_store(["threshold", *pairs, *at]) == code
    assert said in capsys.readouterr().err
    assert store.versions() == [1, 2, 3]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_exported_graph_gives_the_same_probability(
    store: Store, tmp_path: Path, precision: str
) -> None:
    options = ["--out", str(tmp_path / "out"), "--store", store.location, "--precision", precision]
    assert dne_store(["promote", "2", "--store", store.location]) == 0
    assert dne_store(["retire-class", "c", "--store", store.location]) == 0
    assert dne_store(["threshold", "a", "0.25", "--store", store.location]) == 0
    assert dne_store(["export-onnx", "4", *options]) == 0
    (graph,) = (tmp_path / "out").glob("*.onnx")
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    manifest = store.manifest(4)
    batch = normalise(pixels(NAMES), manifest.preprocessing)
    logits, found = session.run(["logits", "unknown_score"], {"images": batch})
    assert logits.shape == (len(NAMES), len(manifest.classes))
    right = expected(store, manifest)
    np.testing.assert_allclose(found, right, atol=1e-3 if precision == "fp32" else 0.2)
    assert manifest.unknown is not None
    metadata = session.get_modelmeta().custom_metadata_map
    assert float(metadata["unknown_above"]) == none_of_these(manifest.unknown.threshold)
    assert json.loads(metadata["unknown_above_by_class"]) == {"a": 0.25}


def test_evaluate_judges_by_the_score_that_the_server_answers(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = write_classes(tmp_path / "strange", STRANGE, images=2)
    known = write_classes(tmp_path / "known", [*LETTERS, *DIGITS], images=4, seed=5)
    given = ["--data", str(known), "--unknown-data", str(strange), "--store", str(made / "models")]
    assert dne_train(["evaluate", *given, "--version", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["unknown"]
    assert told["score"] == "log-odds"
    assert told["auroc"] > 0.9


def test_the_protocol_offers_the_probability(store: Store) -> None:
    image = png(pixels(["a"])[0])
    outputs = [{"name": "unknown_score"}, {"name": "unknown"}]
    with live_server(Path(store.location)) as live:
        live.wait_until_ready()
        answer = infer(live, image_tensor(image), outputs=outputs)
        plain = live.predict(image).json()["predictions"][0]
    score, unknown = (one["data"][0] for one in answer.json()["outputs"])
    assert score == pytest.approx(plain["unknown_score"], abs=1e-5)
    assert unknown == plain["unknown"]
