"""Requests of the Open Inference Protocol, made byte by byte."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx

from tests.live_server import Live

INFER = "/v2/models/dne/infer"
LENGTH = "Inference-Header-Content-Length"


def assert_error(answer: httpx.Response, status: int, *, says: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error", "instance"}
    assert says in body["error"]
    assert "Traceback" not in answer.text


def base64_of(*images: bytes) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]


def image_tensor(*images: bytes, **changes: Any) -> dict[str, Any]:
    return {
        "name": "image",
        "datatype": "BYTES",
        "shape": [len(images)],
        "data": base64_of(*images),
        **changes,
    }


def infer(live: Live, *inputs: dict[str, Any], path: str = INFER, **more: Any) -> httpx.Response:
    return live.http.post(path, json={"inputs": inputs, **more})


def prefixed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def infer_binary(
    live: Live, tensor: dict[str, Any], binary: bytes, *, size: Any = None, length: Any = None
) -> httpx.Response:
    """One tensor as binary data; `size` and `length` instead of the right ones."""
    tensor = {**tensor, "parameters": {"binary_data_size": len(binary) if size is None else size}}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {LENGTH: str(len(text) if length is None else length)}
    return live.http.post(INFER, content=text + binary, headers=headers)
