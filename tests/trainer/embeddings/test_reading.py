"""Embeddings are the same whatever computes them, and large networks are read by onnxruntime."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.network.network import Network
from model_store.onnx.model import OnnxPrecision
from tests.model_store.networks import grown, images
from trainer.embeddings import reading
from trainer.embeddings.reading import Read, begun_late, read_in, reader_of


def test_a_small_network_is_read_by_torch() -> None:
    network = grown([2, 1])
    experts = Lineage.of(network)
    assert reader_of(network, experts) == experts.token


def test_a_large_network_is_read_by_onnxruntime_with_the_same_embeddings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    monkeypatch.setattr(reading, "LARGE_FLOP", 1)
    begun: list[str] = []

    def noted(network: Network, precision: OnnxPrecision) -> Read:
        begun.append(precision)
        return read_in(network, precision)

    monkeypatch.setattr(reading, "read_in", noted)
    network = grown([2, 1, 1])
    experts = Lineage.of(network)
    read = reader_of(network, experts)
    assert begun == []
    batch = images(5)
    with torch.inference_mode():
        assert torch.allclose(read(batch), experts.token(batch), atol=1e-4)
    assert begun == ["fp32"]


def test_without_onnxruntime_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGE_FLOP", 1)
    monkeypatch.setattr(reading, "has_onnxruntime", lambda: False)
    network = grown([2])
    experts = Lineage.of(network)
    assert reader_of(network, experts) == experts.token


def test_a_reader_begins_once() -> None:
    made: list[int] = []

    def make() -> Read:
        made.append(1)
        return lambda images_BCHW: images_BCHW + 1

    read = begun_late(make)
    assert not made
    one: Tensor = torch.zeros(1)
    assert read(read(one)).item() == 2
    assert made == [1]
