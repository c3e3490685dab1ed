"""Every kind of store that the trainer makes is measured, served, exported and verified."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from dne_serve.engines.base import Engine
from dne_serve.engines.candidates import Measurement
from dne_serve.engines.choose import Measuring, Wanted, request_for
from dne_serve.engines.onnx_engine import OnnxEngine
from dne_serve.engines.torch_engine import TorchEngine
from model_store.cli.main import main as dne_store
from model_store.codec import load_network
from model_store.precision import remembered_trial
from model_store.preprocess import normalise, read_pixels
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.kinds_of_stores import FAMILIES, KINDS, store_of
from tests.live_server import live_server, wait_for
from trainer.cli import main as dne_train

ENGINES: dict[str, Callable[[], Engine]] = {
    "torch": lambda: TorchEngine(device="cpu", threads=1, precision="fp32"),
    "onnx": lambda: OnnxEngine(device="cpu", threads=1, precision="fp32"),
}
WANTED = Wanted(threads=2, max_batch=16, precision="auto", room_bytes=8 << 30)
NEAR = 2e-3
Confusion = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A store, the version that it serves, and images of its classes."""

    location: Path

    @property
    def manifest(self) -> Manifest:
        store = Store.open(str(self.location))
        head = store.head("production")
        assert head is not None
        return store.resolve(head)

    @property
    def data(self) -> Path:
        return self.location.with_name("data")

    def images(self) -> list[Path]:
        return sorted(self.data.glob("*/*.png"))

    def told(self, main: Callable[[list[str]], int], *arguments: str) -> dict[str, Any]:
        """Run a command that must end well, and give its JSON."""
        with redirect_stdout(io.StringIO()) as printed:
            assert main([*arguments, "--store", str(self.location), "--json"]) == 0
        answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        return answer


@pytest.fixture(scope="module", params=[*KINDS, *FAMILIES])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return Kind(store_of(request.param, tmp_path_factory))


def confusion(pairs: list[tuple[str, str]]) -> Confusion:
    """Count the answers for each class."""
    found: Confusion = {}
    for (right, answer), count in Counter(pairs).items():
        found.setdefault(right, {})[answer] = count
    return found


def answers(kind: Kind, engine: Engine) -> list[dict[str, Any]]:
    """Ask a live server about all images, in requests of 24."""
    images, found = kind.images(), []
    with live_server(kind.location, engine=engine) as live:
        wait_for(lambda: live.http.get("/readyz").status_code == 200)
        for begin in range(0, len(images), 24):
            files = [("files", one.read_bytes()) for one in images[begin : begin + 24]]
            answer = live.http.post("/predict", files=files)
            assert answer.status_code == 200, answer.text
            found += answer.json()["predictions"]
    return found


@pytest.mark.timeout(600)
def test_a_server_answers_as_the_trainer_does(kind: Kind) -> None:
    evaluated = kind.told(dne_train, "evaluate", "--data", str(kind.data), "--device", "cpu")
    rights = [path.parent.name for path in kind.images()]
    by_engine = {name: answers(kind, make()) for name, make in ENGINES.items()}
    for name, found in by_engine.items():
        pairs = list(zip(rights, (one["label"] for one in found), strict=True))
        assert confusion(pairs) == evaluated["confusion"], name
    scores_EN = np.array([[one["score"] for one in found] for found in by_engine.values()])
    assert np.ptp(scores_EN, axis=0).max() < NEAR


@pytest.mark.timeout(600)
def test_its_engine_is_measured(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = kind.manifest
    trial = remembered_trial("int8")
    assert trial is not None
    assert trial.runs, trial.reason
    if trial.speedup >= 0.5 and served.held_out and not served.retired:
        assert "int8" in served.metrics.agreement
    monkeypatch.setenv("DNE_CACHE", str(tmp_path))
    asked = Measurement(
        store=str(kind.location),
        version=served.version,
        digest=served.digest,
        request=request_for(WANTED, served),
    )
    measured = Measuring(asked).run()
    assert measured.fault == ""
    assert measured.excluded == ()
    assert measured.best(asked.request) in asked.request.candidates


@pytest.mark.timeout(600)
def test_it_is_exported_and_verified(kind: Kind, tmp_path: Path) -> None:
    served = kind.manifest
    number = str(served.version)
    kind.told(dne_store, "export-onnx", number, "--out", str(tmp_path))
    assert kind.told(dne_store, "verify")["ok"]
    read = [read_pixels(one.read_bytes(), served.preprocessing) for one in kind.images()[::6]]
    images = normalise(np.stack(read), served.preprocessing)
    session = onnxruntime.InferenceSession(str(tmp_path / f"version-{served.version:08}.onnx"))
    (logits,) = session.run(["logits"], {"images": images})
    with torch.no_grad():
        network = load_network(Store.open(str(kind.location)).read_shard, served)
        expected = network(torch.from_numpy(images)).numpy()[:, list(served.places)]
    assert np.abs(logits - expected).max() < NEAR * max(1.0, np.abs(expected).max())
