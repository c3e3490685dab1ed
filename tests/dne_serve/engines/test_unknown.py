from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dne_serve.engines.choose import choose_engine
from model_store.codec import load_network
from model_store.preprocess import normalise, read_pixels
from model_store.records.manifest import Manifest, Unknown
from model_store.store.store import Store
from tests.live_server import live_server, png
from tests.tiny_versions import promote, publish_tiny

IMAGES = [png(seed) for seed in range(9)]
TASKS = [("letters", ["a", "b", "c"])]


def scores_of(store: Store, manifest: Manifest) -> np.ndarray:
    preprocessing = manifest.preprocessing
    pixels = np.stack([read_pixels(image, preprocessing) for image in IMAGES])
    with torch.inference_mode():
        network = load_network(store.read_shard, manifest)
        logits = network(torch.from_numpy(normalise(pixels, preprocessing))).numpy()
    return np.asarray(logits.max(axis=1))


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_images_below_the_threshold_are_answered_as_unknown_with_the_nearest_label(
    tmp_path: Path, backend: str
) -> None:
    if backend == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX NOT TRIED: onnxruntime is not installed")
    store = Store.create(str(tmp_path / "models"))
    scores = scores_of(store, publish_tiny(store, tasks=TASKS))
    threshold = float(np.sort(scores)[3:5].mean())
    detector = Unknown(score="max-logit", threshold=threshold, rate=0.05, images=20)
    promote(store, publish_tiny(store, tasks=TASKS, unknown=detector))
    engine = choose_engine(backend, device="cpu", threads=1)
    with live_server(Path(store.location), engine=engine) as live:
        live.wait_until_ready()
        with_threshold = live.predict(*IMAGES).json()["predictions"]
        without = live.predict(*IMAGES, query="?version=1").json()["predictions"]
        shown = live.http.get("/versions/2").json()["unknown"]
    assert [one["unknown"] for one in with_threshold] == (scores < threshold).tolist()
    assert sum(one["unknown"] for one in with_threshold) == 4
    assert not any(one["unknown"] for one in without)
    assert [one["label"] for one in with_threshold] == [one["label"] for one in without]
    assert shown == detector.model_dump()
