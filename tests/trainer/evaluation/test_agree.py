from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

from model_store.network.network import Network
from model_store.precision import Trial
from model_store.records.manifest import Preprocessing
from model_store.records.quality import Reduced
from tests.model_store.networks import grown
from trainer.data.folders import LabelledImages
from trainer.evaluation import precision_agreement as agree
from trainer.evaluation.judged import Judged, judge
from trainer.evaluation.precision_agreement import agreement_of

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

PREPROCESSING = Preprocessing(image_size=8)


def labelled(network: Network, count: int) -> LabelledImages:
    numbers = np.random.default_rng(0)
    return LabelledImages(
        classes=network.spec.classes,
        pixels_NHWC=numbers.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8),
        labels_N=np.zeros(count, dtype=np.int64),
    )


def runs_int8(precision: str) -> Trial:
    return Trial(runs=precision == "int8", speedup=1.0)


def runs_bf16(precision: str) -> Trial:
    return Trial(runs=precision == "bf16", speedup=1.0)


def agreement(
    network: Network,
    count: int,
    *,
    judged: Judged | None = None,
    try_out: Callable[[str], Trial] = runs_int8,
) -> dict[Reduced, float]:
    images = labelled(network, count)
    judged = judged or judge(network, images, preprocessing=PREPROCESSING)
    return agreement_of(
        network, images=images, judged=judged, preprocessing=PREPROCESSING, try_out=try_out
    )


def test_the_share_of_equal_answers_is_measured_where_a_precision_runs() -> None:
    network = grown([2, 1])
    found = agreement(network, 40)
    assert found.keys() == {"int8"}
    assert found["int8"] >= 0.9


def test_16_bits_are_compared_where_they_run_and_without_onnxruntime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = agreement(grown([2, 1]), 40, try_out=runs_bf16)
    assert found.keys() == {"bf16"}
    assert found["bf16"] >= 0.9


def test_answers_that_differ_count() -> None:
    network = grown([2, 1])
    images = labelled(network, 40)
    judged = judge(network, images, preprocessing=PREPROCESSING)
    turned = Judged(
        classes=judged.classes, labels_N=judged.labels_N, logits_NC=-1 * judged.logits_NC
    )
    assert agreement(network, 40, judged=turned)["int8"] < 0.2
    assert agreement(network, 40, judged=turned, try_out=runs_bf16)["bf16"] < 0.2


def test_retired_classes_are_no_answers() -> None:
    network = grown([2, 1])
    images = labelled(network, 40)
    often = judge(network, images, preprocessing=PREPROCESSING).logits_NC.argmax(1)
    gone = network.spec.classes[int(np.bincount(often).argmax())]
    judged = judge(network, images, preprocessing=PREPROCESSING, retired=[gone])
    assert agreement(network, 40, judged=judged)["int8"] >= 0.9


def test_nothing_is_said_without_images_or_of_precisions_that_are_imitated() -> None:
    network = grown([2, 1])
    assert agreement(network, 0) == {}
    images = labelled(network, 4)
    judged = judge(network, images, preprocessing=PREPROCESSING)
    assert (
        agreement_of(
            network,
            images=images,
            judged=judged,
            preprocessing=PREPROCESSING,
            try_out=lambda precision: Trial(runs=True, speedup=agree.MIN_SPEEDUP / 2),
        )
        == {}
    )


def test_many_images_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "MAX_IMAGES", 5)
    network = grown([2])
    assert agreement(network, 40)["int8"] * 5 % 1 == pytest.approx(0)
