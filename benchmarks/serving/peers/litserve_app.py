"""LitServe with its batching, one worker a model. With BENCH_MODELS each model has an API and a
path of its own, as LitServe's documentation has it."""

from __future__ import annotations

import base64
import os
from typing import Any

import litserve as ls

from benchmarks.serving.peers.model import MAX_BATCH, Classifier


class Api(ls.LitAPI):
    def setup(self, device: str) -> None:
        self.classifier = Classifier()

    def decode_request(self, request: dict[str, str]) -> Any:
        return self.classifier.decode(base64.b64decode(request["image"]))

    def batch(self, inputs: list[Any]) -> list[Any]:
        return list(inputs)

    def predict(self, x: list[Any]) -> list[dict[str, Any]]:
        return self.classifier.classify(x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    count = int(os.environ.get("BENCH_MODELS", "0"))
    options = {"max_batch_size": MAX_BATCH, "batch_timeout": 0.002}
    many = [Api(**options, api_path=f"/models/m{place:04}/predict") for place in range(count)]
    server = ls.LitServer(many or Api(**options), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        generate_client_file=False,
        log_level="warning",
    )
