"""MLServer with its adaptive batching, in its own process."""

from __future__ import annotations

import base64

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from benchmarks.serving.peers.model import Classifier


class Runtime(MLModel):
    async def load(self) -> bool:
        self.classifier = Classifier()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        images = [base64.b64decode(one) for one in payload.inputs[0].data]
        found = self.classifier.classify([self.classifier.decode(one) for one in images])
        labels = [one["label"] for one in found]
        output = ResponseOutput(name="label", shape=[len(labels), 1], datatype="BYTES", data=labels)
        return InferenceResponse(model_name=self.name, outputs=[output])
