"""The model that every peer serves: version, weights and preprocessing are those of our own server,
on as many threads. It is the network as PyTorch modules, which is what anybody has who loads the
weights elsewhere; with BENCH_FORM=folded it is the form that our own torch backend computes, and
with the path of an ONNX file onnxruntime computes that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from model_store.codec import load_network
from model_store.inference.forward import FoldedNetwork
from model_store.preprocess import Pixels, fit_pixels, normalise, read_pixels
from model_store.records.manifest import Manifest
from model_store.store.store import Store

MAX_BATCH = 16


def _network(
    store: Store, manifest: Manifest, *, form: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    if form.endswith(".onnx"):
        return _in_onnxruntime(form)
    network = load_network(store.read_shard, manifest).eval()
    return FoldedNetwork.of(network) if form == "folded" else network


def _in_onnxruntime(path: str) -> Callable[[torch.Tensor], torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


class Classifier:
    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
        store = Store.open(os.environ["BENCH_STORE"])
        self._manifest = store.manifest(1)
        self._network = _network(store, self._manifest, form=os.environ.get("BENCH_FORM", ""))
        self._labels = self._manifest.spec.classes
        size = self._manifest.preprocessing.image_size
        for count in (1, MAX_BATCH):
            self.classify([np.zeros((size, size, 3), dtype=np.uint8)] * count)

    def decode(self, data: bytes) -> Pixels:
        return read_pixels(data, self._manifest.preprocessing)

    def fit(self, pixels_HWC: Pixels) -> Pixels:
        """For a server that decodes by itself."""
        return fit_pixels(pixels_HWC, self._manifest.preprocessing)

    def classify(self, pixels: Sequence[Pixels]) -> list[dict[str, Any]]:
        images = normalise(np.stack(pixels), self._manifest.preprocessing)
        with torch.inference_mode():
            scores = torch.softmax(self._network(torch.from_numpy(images)), dim=-1)
        best = scores.argmax(dim=-1).tolist()
        return [
            {"label": self._labels[place], "score": float(row[place])}
            for place, row in zip(best, scores, strict=True)
        ]
