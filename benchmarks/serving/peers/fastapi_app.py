"""Plain FastAPI: one image a request, no batching."""

from __future__ import annotations

import os
from typing import Any

import uvicorn
from fastapi import FastAPI, UploadFile

from benchmarks.serving.peers.model import Classifier

app = FastAPI()
classifier = Classifier()


@app.post("/predict")
def predict(files: UploadFile) -> dict[str, Any]:
    return classifier.classify([classifier.decode(files.file.read())])[0]


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["BENCH_PORT"]), log_level="warning")
