"""Which backend `auto` takes, and that a server says which one it took."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import httpx
import pytest
import torch

from dne_serve.engines.choose import PAYS, backend_for, served_by
from dne_serve.settings import load_settings
from model_store import precision
from model_store.errors import WrongUsage
from model_store.precision import REMEMBERED, Asked, Trial
from model_store.records.manifest import Manifest
from model_store.records.quality import Reduced
from model_store.store.store import Store
from tests.dne_serve.test_cli import run, running
from tests.dne_serve.test_precision import agreeing
from tests.tiny_versions import promote, publish_tiny

pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")

FAST = Trial(runs=True, speedup=2.0)


class Trying:
    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.tried: list[Reduced] = []

    def __call__(self, name: Reduced) -> Trial:
        self.tried.append(name)
        return self._trial


def chosen(
    served: Manifest | None, *, asked: Asked = "auto", device: str = "cpu", trial: Trial = FAST
) -> str:
    return backend_for(served, asked=asked, device=device, try_out=Trying(trial))


def test_torch_serves_unless_told_otherwise() -> None:
    assert load_settings().backend == "torch"
    assert load_settings(backend="auto").backend == "auto"


def test_onnx_is_taken_where_eight_bits_agree_and_pay(letters: Manifest) -> None:
    agrees = agreeing(letters, 0.995)
    assert chosen(agrees) == "onnx"
    assert chosen(agrees, trial=Trial(runs=True, speedup=PAYS - 0.01)) == "torch"
    assert chosen(agrees, trial=Trial(runs=False, reason="SIGILL")) == "torch"
    assert chosen(agreeing(letters, 0.98)) == "torch"
    assert chosen(letters) == "torch"  # nothing was measured
    assert chosen(None) == "torch"


def test_nothing_is_tried_out_for_a_version_that_may_not_be_computed_so(letters: Manifest) -> None:
    trying = Trying(FAST)
    backend_for(agreeing(letters, 0.98), asked="auto", device="cpu", try_out=trying)
    assert trying.tried == []


def test_a_precision_that_was_asked_for_decides(letters: Manifest) -> None:
    assert chosen(agreeing(letters, 1.0), asked="fp32") == "torch"
    assert chosen(agreeing(letters, 1.0), asked="bf16") == "torch"
    assert chosen(None, asked="int8") == "onnx"


def test_a_gpu_is_for_torch(letters: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    agrees = agreeing(letters, 1.0)
    assert chosen(agrees, device="auto") == "torch"
    assert chosen(agrees, device="cuda") == "torch"
    assert chosen(agrees, device="cpu") == "onnx"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(agrees, device="auto") == "onnx"
    with pytest.raises(WrongUsage, match="cuda"):
        chosen(agrees, device="cuda")


def test_without_the_runtime_it_is_torch(
    letters: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chosen(agreeing(letters, 1.0)) == "torch"


def test_what_cannot_be_read_decides_nothing(store: Store, letters: Manifest) -> None:
    assert served_by(None, channel="production") is None
    assert served_by(store, channel="elsewhere") is None
    assert served_by(store, channel="production") == letters
    Path(store.location, "versions", "00000001.json").write_text("{}")
    assert served_by(Store.open(store.location), channel="production") is None


@pytest.mark.parametrize(("share", "backend"), [(1.0, "onnx"), (0.5, "torch")])
def test_a_server_says_which_backend_it_took(
    store: Store, tmp_path: Path, share: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNE_CACHE", str(tmp_path / "cache"))
    precision._remember(tmp_path / "cache" / REMEMBERED, {precision._machine(): {"int8": FAST}})
    promote(store, publish_tiny(store, agreement={"int8": share}))
    given = ("--store", store.location, "--backend", "auto", "--device", "cpu")
    with running(*given) as (_, url):
        assert httpx.get(f"{url}/readyz").json()["backend"] == backend
        assert httpx.get(f"{url}/v2/models/dne").json()["platform"] == f"dne_{backend}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--backend", "onnx", "--precision", "bf16"), "the backend onnx has none"),
        (("--backend", "torch", "--precision", "int8"), "the backend torch has none"),
        (("--backend", "torch", "--workers", "2"), "the backend torch runs one batch at a time"),
    ],
)
def test_what_a_backend_does_not_have_is_wrong_usage(
    tmp_path: Path, given: tuple[str, ...], says: str
) -> None:
    code, said = run("--store", str(tmp_path), "--port", "0", *given)
    assert code == 2
    assert says in said
