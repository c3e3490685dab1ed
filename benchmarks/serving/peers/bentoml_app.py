"""BentoML with its adaptive batching, one worker."""

from __future__ import annotations

from typing import Any

import bentoml
import numpy as np
from PIL import Image

from benchmarks.serving.peers.model import MAX_BATCH, Classifier
from model_store.preprocess import Pixels


@bentoml.service(workers=1, traffic={"timeout": 60})
class Service:
    def __init__(self) -> None:
        self.classifier = Classifier()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=10_000)
    def predict(self, images: list[Image.Image]) -> list[dict[str, Any]]:
        return self.classifier.classify([self._pixels(one) for one in images])

    def _pixels(self, image: Image.Image) -> Pixels:
        return self.classifier.fit(np.asarray(image.convert("RGB")))
