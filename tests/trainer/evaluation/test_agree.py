from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from model_store.inference.doubt import Doubt
from model_store.network.network import Network
from model_store.precision import Trial
from model_store.records.manifest import Preprocessing
from model_store.records.quality import Reduced
from tests.model_store.networks import grown
from trainer.data.folders import LabelledImages
from trainer.evaluation import precision_agreement as agree
from trainer.evaluation.judged import Judged, judge
from trainer.evaluation.precision_agreement import Floats, agreement_of

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


def test_the_agreement_is_measured_where_a_precision_runs() -> None:
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
    assert agreement(network, 40, judged=turned)["int8"] < 0.5
    assert agreement(network, 40, judged=turned, try_out=runs_bf16)["bf16"] < 0.5


def test_an_answer_that_flips_between_two_equals_costs_little() -> None:
    whole_NC = np.tile(np.array([4.0, 0.0], dtype=np.float32), (40, 1))
    other_NC = whole_NC.copy()
    whole_NC[0], other_NC[0] = (0.01, 0.0), (0.0, 0.01)
    assert agree.distances(whole_NC, other_NC, temperature=1.0).mean() < 0.001
    assert agree.distances(whole_NC, other_NC, temperature=0.001).mean() > 0.02


def test_a_precision_that_is_less_accurate_beyond_chance_has_no_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = grown([2, 1])
    monkeypatch.setattr(agree, "count_flips", lambda whole, reduced: (4, 0))
    assert agreement(network, 40)["int8"] > 0.9
    monkeypatch.setattr(agree, "count_flips", lambda whole, reduced: (5, 0))
    assert agreement(network, 40)["int8"] == 0.0


def test_another_probability_to_be_unknown_counts() -> None:
    network = grown([2, 1])
    images = labelled(network, 8)
    judged = judge(network, images, preprocessing=PREPROCESSING)

    class HalfUnknown:
        """Calls images unknown by the sign of a token that only single precision has."""

        def log_odds(self, token_NW: Floats) -> Floats:
            return np.where(token_NW[:, 0] > 1e6, 9.0, 0.0).astype(np.float32)

    found = agreement_of(
        network,
        images=images,
        judged=judged,
        preprocessing=PREPROCESSING,
        embeddings_NW=np.full((8, network.spec.doubt_width), 2e6, dtype=np.float32),
        doubt=cast(Doubt, HalfUnknown()),
        try_out=runs_int8,
    )
    assert found["int8"] == pytest.approx(0.5, abs=0.01)


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
    asked: list[int] = []

    def read(precision: Reduced, make: object, images: LabelledImages) -> Floats:
        asked.append(len(images))
        return np.zeros((len(images), network.spec.token_width), dtype=np.float32)

    images = labelled(network, 40)
    agreement_of(
        network,
        images=images,
        judged=judge(network, images, preprocessing=PREPROCESSING),
        preprocessing=PREPROCESSING,
        try_out=runs_int8,
        read_embeddings=read,
    )
    assert asked == [5]
