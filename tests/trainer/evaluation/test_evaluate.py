from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_store.errors import ChannelNotFound, StoreNotFound, VersionNotFound, WrongUsage
from model_store.inference.forward import Lineage
from model_store.preprocess import normalise
from model_store.records.manifest import Preprocessing
from model_store.store.store import Store
from tests.model_store.networks import grown
from tests.tiny_versions import promote, publish_tiny
from tests.trainer.folders import Listening, labelled, write_classes
from trainer.embeddings import reading
from trainer.evaluation.evaluate import evaluate
from trainer.evaluation.judged import Judged, judge
from trainer.request import Evaluate

JUDGED = Judged(
    classes=("a", "b", "c"),
    labels_N=np.array([0, 0, 1, 1]),
    logits_NC=np.array([[9, 0, 0], [0, 9, 0], [0, 9, 0], [0, 9, 0]], dtype=np.float32),
)


def test_accuracy_is_the_share_of_right_answers() -> None:
    assert JUDGED.accuracy() == 0.75
    assert JUDGED.accuracy(["a"]) == 0.5
    assert JUDGED.accuracy(["a", "b"]) == 0.75
    assert JUDGED.per_class() == {"a": 0.5, "b": 1.0}


def test_where_there_is_nothing_to_judge_by_there_is_no_accuracy() -> None:
    assert JUDGED.accuracy(["c"]) is None
    assert JUDGED.accuracy([]) is None


def test_confusion_counts_what_was_taken_for_what() -> None:
    assert JUDGED.confusion() == {"a": {"a": 1, "b": 1}, "b": {"b": 2}}


@pytest.mark.parametrize(("images", "bin_count"), [(400, 15), (100, 5), (7, 1)])
def test_calibration_error_against_a_plain_count(images: int, bin_count: int) -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(images, 4)).astype(np.float32) * 2
    labels = draw.integers(0, 4, images)
    temperature = 1.7
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(logits.astype(np.float64) / temperature, labels, strict=True):
        chances = np.exp(row) / np.exp(row).sum()
        entry = (float(chances.max()), bool(chances.argmax() == label))
        bins.setdefault(min(int(chances.max() * bin_count), bin_count - 1), []).append(entry)
    plain = sum(
        abs(sum(right for _, right in one) - sum(sure for sure, _ in one)) for one in bins.values()
    )
    judged = Judged(classes=tuple("abcd"), labels_N=labels, logits_NC=logits)
    assert judged.calibration_error(temperature=temperature) == pytest.approx(plain / images)


@pytest.mark.parametrize("images", [60, 440])
def test_the_calibration_error_by_chance_is_that_of_drawn_labels(images: int) -> None:
    draw = np.random.default_rng(1)
    logits = draw.normal(size=(images, 2)).astype(np.float32) * 2
    shares = np.exp(logits.astype(np.float64) / 1.3)
    shares /= shares.sum(axis=1, keepdims=True)
    drawn: list[float] = []
    for _ in range(300):
        labels = (draw.random(images) < shares[:, 1]).astype(np.int64)
        judged = Judged(classes=("a", "b"), labels_N=labels, logits_NC=logits)
        error = judged.calibration_error(temperature=1.3)
        assert error is not None
        drawn.append(error)
    assert judged.chance_calibration_error(temperature=1.3) == pytest.approx(
        np.mean(drawn), rel=0.05
    )
    assert judged.take(np.zeros(0, np.int64)).chance_calibration_error(temperature=1) is None


def test_judging_in_batches_is_judging_at_once() -> None:
    network, images = grown([2, 1]), labelled([70, 70])
    preprocessing = Preprocessing(image_size=8)
    judged = judge(network, images, preprocessing=preprocessing)
    with torch.no_grad():
        at_once = network(torch.from_numpy(normalise(images.pixels_NHWC, preprocessing)))
    np.testing.assert_allclose(judged.logits_NC, at_once, atol=1e-5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1 knows a and b, version 2, which is promoted, 0 and 1 as well."""
    store = Store.create(str(tmp_path / "models"))
    first = promote(store, publish_tiny(store))
    promote(store, publish_tiny(store, tasks=[("digits", ["0", "1"])], parent=first, seed=1))
    return store


def request(store: Store, data: Path, *, version: int | None = None) -> Evaluate:
    return Evaluate(
        store=store.location, data=data, channel="production", version=version, device="cpu"
    )


def test_a_version_is_judged_on_old_and_new_classes_apart(store: Store, tmp_path: Path) -> None:
    data = write_classes(tmp_path / "data", ["a", "1"], images=3)
    report = evaluate(request(store, data), progress=Listening())
    assert (report["version"], report["images"]) == (2, 6)
    assert set(report["per_class"]) == {"a", "1"}
    assert report["accuracy"]["old"] == report["per_class"]["a"]
    assert report["accuracy"]["new"] == report["per_class"]["1"]
    assert report["accuracy"]["all"] == pytest.approx(
        (report["accuracy"]["old"] + report["accuracy"]["new"]) / 2
    )
    assert sum(sum(row.values()) for row in report["confusion"].values()) == 6
    assert 0 <= report["calibration_error"] <= 1


def test_an_older_version_is_judged_by_what_it_knew(store: Store, tmp_path: Path) -> None:
    data = write_classes(tmp_path / "data", ["a", "b"], images=2)
    report = evaluate(request(store, data, version=1), progress=Listening())
    assert report["version"] == 1
    assert report["accuracy"]["old"] is None
    with pytest.raises(WrongUsage, match="holds '0', which the model does not know"):
        evaluate(
            request(store, write_classes(tmp_path / "new", ["0"], images=2), version=1),
            progress=Listening(),
        )


def test_a_large_network_is_judged_as_its_embeddings_are_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    data = write_classes(tmp_path / "data", ["a", "b"], images=2)
    by_torch = evaluate(request(store, data), progress=Listening())

    def refused(*given: object) -> None:
        raise AssertionError("torch reads a large network")

    monkeypatch.setattr(reading, "LARGE_FLOP", 1)
    monkeypatch.setattr(Lineage, "token", refused)
    report = evaluate(request(store, data), progress=Listening())
    assert report["confusion"] == by_torch["confusion"]


def test_what_is_not_there_cannot_be_judged(store: Store, tmp_path: Path) -> None:
    data = write_classes(tmp_path / "data", ["a"], images=2)
    with pytest.raises(VersionNotFound, match="there is no version 9; the newest is 2"):
        evaluate(request(store, data, version=9), progress=Listening())
    empty = Store.create(str(tmp_path / "empty"))
    with pytest.raises(ChannelNotFound, match="names no version"):
        evaluate(request(empty, data), progress=Listening())
    with pytest.raises(StoreNotFound):
        evaluate(
            Evaluate(store=str(tmp_path / "no"), data=data, channel="production"),
            progress=Listening(),
        )


def test_a_folder_without_images_judges_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    with pytest.raises(WrongUsage, match="holds no images"):
        evaluate(request(store, tmp_path / "data"), progress=Listening())
