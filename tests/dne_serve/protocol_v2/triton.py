"""A tritonclient of a live server, and the inputs it sends."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.http as triton

from tests.live_server import Live


@contextmanager
def connected(live: Live, **options: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(live.url.removeprefix("http://"), **options) as client:
        yield client


def image_input(*images: bytes, binary: bool = True) -> triton.InferInput:
    given = triton.InferInput("image", [len(images)], "BYTES")
    texts = images if binary else [base64.b64encode(image) for image in images]
    return given.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=binary)


def tensor_input(name: str, values: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    datatype = {"uint8": "UINT8", "float32": "FP32"}[str(values.dtype)]
    given = triton.InferInput(name, list(values.shape), datatype)
    return given.set_data_from_numpy(values, binary_data=binary)
