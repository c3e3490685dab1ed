from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dne_serve.engines.base import finish
from dne_serve.engines.choose import choose_engine
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from dne_serve.errors import ModelUnusable
from model_store.codec import load_network
from model_store.errors import WrongUsage
from model_store.preprocess import normalise
from model_store.records.manifest import Manifest
from model_store.spec import NetworkSpec
from model_store.store.store import Store
from tests.dne_serve.engines.asking import Reads, ask, load, noise
from tests.model_store.networks import BACKBONES
from tests.tiny_versions import publish_tiny

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

ENGINES = [TorchEngine, OnnxEngine]
MakeEngine = Callable[..., TorchEngine | OnnxEngine]


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_onnx_gives_the_answers_of_torch(store: Store, digits: Manifest, batch: int) -> None:
    third = publish_tiny(store, tasks=[("greek", ["alpha", "beta"])], parent=digits, seed=5)
    logits = []
    for make in ENGINES:
        engine = make(device="cpu", threads=1)
        logits.append(ask(engine, load(engine, store, third), noise(batch)))
    torch_logits, onnx_logits = logits
    assert torch_logits.shape == (batch, 7)
    assert np.abs(torch_logits - onnx_logits).max() <= 1e-4
    assert (torch_logits.argmax(1) == onnx_logits.argmax(1)).all()


@pytest.mark.parametrize("geometry", BACKBONES)
@pytest.mark.parametrize("make", ENGINES)
def test_a_lineage_on_a_backbone_is_served_like_any(
    make: MakeEngine, store: Store, geometry: NetworkSpec
) -> None:
    first = publish_tiny(store, spec=geometry, heads=2)
    second = publish_tiny(store, tasks=[("greek", ["alpha", "beta"])], parent=first, seed=5)
    engine = make(device="cpu", threads=1)
    for manifest in (first, second):
        network = load_network(store.read_shard, manifest)
        with torch.no_grad():
            images = torch.from_numpy(normalise(np.stack(noise(3)), manifest.preprocessing))
            expected = network(images).numpy()
        found = ask(engine, load(engine, store, manifest), noise(3))
        assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize("make", ENGINES)
def test_a_version_that_shares_experts_costs_its_delta(
    make: MakeEngine, store: Store, letters: Manifest, digits: Manifest
) -> None:
    engine = make(device="cpu", threads=1)
    first = load(engine, store, letters)
    before = ask(engine, first, noise(4))
    delta = {digits.experts[1].sha256, digits.classifier.sha256}
    reads = Reads(store)
    fetched = engine.fetch(digits, read=reads)
    assert reads.digests == delta
    second = finish(engine.load(fetched))
    np.testing.assert_allclose(ask(engine, first, noise(4)), before, atol=1e-5)

    finish(engine.retain([first]))
    assert len(ask(engine, second, noise(1))) == 1  # requests under way still hold it
    del second, fetched
    finish(engine.retain([first]))
    again = Reads(store)
    engine.fetch(digits, read=again)
    assert again.digests == delta


@pytest.mark.parametrize("make", ENGINES)
def test_a_network_that_overflows_is_refused_when_it_is_loaded(
    make: MakeEngine, store: Store
) -> None:
    overflowing = publish_tiny(store, spread=1e38)
    with pytest.raises(ModelUnusable, match="version 1"):
        load(make(device="cpu", threads=1), store, overflowing)


def test_onnx_without_its_runtime_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WrongUsage, match=r"dne-serve\[onnx\]"):
        choose_engine("onnx", device="auto", threads=None)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_a_device_that_is_absent_is_wrong_usage(backend: str) -> None:
    import onnxruntime
    import torch

    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if torch.cuda.is_available() or has_cuda:
        pytest.skip("THE ABSENCE OF A GPU NOT TRIED: there is one")
    with pytest.raises(WrongUsage, match="cuda"):
        choose_engine(backend, device="cuda", threads=None)
