from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from dne_serve.engines.base import Precisions, finish
from dne_serve.engines.choose import choose_engine
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_device import Gpu
from dne_serve.engines.torch_engine import TorchEngine
from model_store import precision
from model_store.errors import WrongUsage
from model_store.precision import Asked, Trial
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced
from model_store.store.store import Store
from tests.dne_serve.engines.asking import ask, load, noise
from tests.dne_serve.engines.fake_gpu import FakeDriver

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

FAST = Trial(runs=True, speedup=2.0)
SLOW = Trial(runs=True, speedup=0.9)
DEAD = Trial(runs=False, reason="SIGILL", lasting=False)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))


def agreeing(manifest: Manifest, share: float, *, by: Reduced = "int8") -> Manifest:
    metrics = manifest.metrics.model_copy(update={"agreement": {by: share}})
    digest = f"{round(share * 1000):064d}"
    return manifest.model_copy(update={"metrics": metrics, "digest": digest})


def test_each_version_is_judged_by_its_own_agreement_and_once(letters: Manifest) -> None:
    tried: list[str] = []

    def trying(name: Reduced) -> Trial:
        tried.append(name)
        return FAST

    precisions = Precisions("auto", offered=("int8",), backend="onnx", try_out=trying)
    assert precisions.of(letters) == "fp32"
    assert tried == []
    assert precisions.of(agreeing(letters, 0.95)) == "fp32"
    assert precisions.of(agreeing(letters, 0.995)) == "int8"
    assert precisions.of(agreeing(letters, 0.995)) == "int8"
    assert tried == ["int8"]


def test_a_refusal_of_what_was_asked_for_is_told(
    letters: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    precisions = Precisions("int8", offered=("int8",), backend="onnx", try_out=lambda name: FAST)
    with caplog.at_level(logging.WARNING, "dne_serve"):
        assert precisions.of(agreeing(letters, 0.5)) == "fp32"
    assert "50.0 %" in caplog.text


@pytest.mark.parametrize(("share", "reduced"), [(0.95, False), (1.0, True)])
def test_the_onnx_engine_computes_in_eight_bits_only_what_agrees(
    store: Store, digits: Manifest, share: float, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "try_in_child", lambda command: FAST)
    manifest = agreeing(digits, share)
    logits = []
    for asked in ("fp32", "auto"):
        engine = OnnxEngine(device="cpu", threads=1, precision=asked)
        resident = load(engine, store, manifest)
        logits.append(ask(engine, resident, noise(4)))
    apart = np.abs(logits[0] - logits[1]).max()
    assert (apart > 1e-6) == reduced
    assert apart < 0.1 * np.abs(logits[0]).max()


def test_a_precision_that_a_backend_has_not_is_wrong_usage() -> None:
    wrong: list[tuple[str, Asked]] = [("torch", "int8"), ("onnx", "bf16")]
    for backend, asked in wrong:
        with pytest.raises(WrongUsage, match=f"the backend {backend} has none"):
            choose_engine(backend, device="cpu", threads=1, precision=asked)


@pytest.mark.parametrize(("backend", "asked"), [("onnx", "int8"), ("torch", "bf16")])
def test_a_precision_that_kills_its_trial_is_wrong_usage(
    backend: str, asked: Reduced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "try_in_child", lambda command: DEAD)
    with pytest.raises(WrongUsage, match="does not run here: SIGILL"):
        choose_engine(backend, device="cpu", threads=1, precision=asked)


@pytest.mark.parametrize(
    ("asked", "share", "trial", "reduced"),
    [
        ("auto", 1.0, FAST, True),
        ("auto", 1.0, SLOW, False),
        ("auto", 1.0, DEAD, False),
        ("auto", 0.95, FAST, False),
        ("bf16", 1.0, SLOW, True),
        ("bf16", 0.95, FAST, False),
        ("fp32", 1.0, FAST, False),
    ],
)
def test_the_torch_engine_computes_in_16_bits_what_agrees_and_is_faster_or_asked_for(
    store: Store,
    digits: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    asked: Asked,
    share: float,
    trial: Trial,
    reduced: bool,
) -> None:
    monkeypatch.setattr(precision, "try_in_child", lambda command: trial)
    manifest = agreeing(digits, share, by="bf16")
    whole = TorchEngine(device="cpu", threads=1)
    engine = TorchEngine(device="cpu", threads=1, precision=asked)
    logits = [ask(one, load(one, store, manifest), noise(4)) for one in (whole, engine)]
    apart = np.abs(logits[0] - logits[1]).max()
    assert (apart > 0) == reduced
    assert apart < 0.02 * np.abs(logits[0]).max()


def test_versions_in_16_bits_share_their_experts_with_each_other_and_no_others(
    store: Store, letters: Manifest, digits: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "try_in_child", lambda command: FAST)
    engine = TorchEngine(device="cpu", threads=1, precision="auto")
    whole = load(engine, store, digits)
    in_half = agreeing(digits, 1.0, by="bf16")
    fetched = engine.fetch(in_half, read=store.read_shard)
    assert len(fetched.shards) == 3  # nothing that is in memory in single precision helps
    half = finish(engine.load(fetched))
    assert not half.model.covers(whole.model)
    assert not whole.model.covers(half.model)
    older = agreeing(letters, 0.995, by="bf16")
    fetched = engine.fetch(older, read=store.read_shard)
    assert fetched.shards.keys() == {letters.classifier.sha256}
    assert half.model.covers(finish(engine.load(fetched)).model)


def test_the_trial_is_on_the_device_that_will_compute(
    letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def child(command: list[str]) -> Trial:
        asked.append(command[2:])
        return FAST

    monkeypatch.setattr(precision, "try_in_child", child)
    driver = FakeDriver(place=torch.device("cuda"))
    TorchEngine(device=Gpu(driver, max_batch=1), threads=1, precision="bf16")
    TorchEngine(device="cpu", threads=1, precision="bf16")
    TorchEngine(device="cpu", threads=1, precision="bf16")  # remembered
    assert asked == [
        ["model_store.inference.bf16_trial", "bf16", "cuda"],
        ["model_store.inference.bf16_trial", "bf16"],
    ]
