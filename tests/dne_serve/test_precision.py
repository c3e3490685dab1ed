from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from dne_serve.engine import choose_engine
from dne_serve.onnx_engine import OnnxEngine
from dne_serve.precision import Precisions
from model_store import precision
from model_store.errors import WrongUsage
from model_store.manifest import Manifest
from model_store.precision import Trial
from model_store.quality import Reduced
from model_store.store import Store
from tests.dne_serve.asking import ask, load, noise

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

FAST = Trial(runs=True, speedup=2.0)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))


def agreeing(manifest: Manifest, share: float) -> Manifest:
    metrics = manifest.metrics.model_copy(update={"agreement": {"int8": share}})
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
    assert precisions.of(agreeing(letters, 0.98)) == "fp32"
    assert precisions.of(agreeing(letters, 0.995)) == "int8"
    assert precisions.of(agreeing(letters, 0.995)) == "int8"
    assert tried == ["int8"]


def test_a_refusal_of_what_was_asked_for_is_told(
    letters: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    precisions = Precisions("int8", offered=("int8",), backend="onnx", try_out=lambda name: FAST)
    with caplog.at_level(logging.WARNING, "dne_serve"):
        assert precisions.of(agreeing(letters, 0.5)) == "fp32"
    assert "50.0%" in caplog.text


@pytest.mark.parametrize(("share", "reduced"), [(0.98, False), (1.0, True)])
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
    for backend, asked in (("torch", "int8"), ("onnx", "bf16"), ("torch", "bf16")):
        with pytest.raises(WrongUsage, match=f"the backend {backend} has none"):
            choose_engine(backend, device="cpu", threads=1, precision=asked)


def test_a_precision_that_kills_its_trial_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Trial(runs=False, reason="SIGILL", lasting=False)
    monkeypatch.setattr(precision, "try_in_child", lambda command: dead)
    with pytest.raises(WrongUsage, match="does not run here: SIGILL"):
        choose_engine("onnx", device="cpu", threads=1, precision="int8")
