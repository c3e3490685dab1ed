"""Requests of the Open Inference Protocol that are refused, each with its reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dne_serve.protocol_v2.schemas import MAX_JSON_VALUES
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from tests.dne_serve.protocol_v2.v2_requests import (
    INFER,
    LENGTH,
    assert_error,
    image_tensor,
    infer,
    infer_binary,
    prefixed,
)
from tests.live_server import Live, live_server, png

NOISE = [0.5] * 192
REFUSED: dict[str, list[dict[str, Any]]] = {
    "exactly one of the inputs image, pixels, pixels_fp32, normalised": [],
    "exactly one of the inputs": [image_tensor(png(), name="input0")],
    "exactly one of the inputs image": [image_tensor(png()), image_tensor(png())],
    "exactly one of": [image_tensor(png()), image_tensor(png(), name="pixels")],
    "'image' must be BYTES [-1]": [image_tensor(png(), datatype="UINT8")],
    "and is BYTES [1, 2]": [image_tensor(png(), png(), shape=[1, 2])],
    "and is BYTES [0]": [image_tensor(shape=[0])],
    "shape.0: Input should be greater": [image_tensor(png(), shape=[-1])],
    "shape.0: Input should be a valid integer": [image_tensor(png(), shape=[1.0])],
    "shape.0: Input should be less": [image_tensor(png(), shape=[10**30])],
    "shape: List should have at least 1": [image_tensor(png(), shape=[])],
    "takes 2 values, and 1 were sent": [image_tensor(png(), shape=[2])],
    "takes 1000000000 values": [image_tensor(png(), shape=[10**9])],
    "are strings": [image_tensor(png(), data=[1])],
    "is base64, and this one is not": [image_tensor(png(), data=["\u00e9"])],
    "this one is not": [image_tensor(png(), data=["abc"])],
    "needs either data or binary_data_size": [image_tensor(png(), data=None)],
    "either data or": [image_tensor(png(), parameters={"binary_data_size": 0})],
    "binary_data_size: Input should be greater": [
        image_tensor(png(), parameters={"binary_data_size": -1})
    ],
    "a whole number from 0 to 255": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": NOISE}
    ],
    "whole number from 0": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [256] * 192}
    ],
    "a number is too large": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [10**400] * 192}
    ],
    "are numbers": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": ["1"] * 192}
    ],
    "of a UINT8 are numbers": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [True] * 192}
    ],
    "neither flat nor nested like [1, 8, 8, 3]": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 3], "data": [[1] * 192]}
    ],
    "'pixels' must be UINT8 [-1, -1, -1, 3]": [
        {"name": "pixels", "datatype": "UINT8", "shape": [1, 3, 8, 8], "data": [1] * 192}
    ],
    "'normalised' must be FP32 [-1, 3, 8, 8]": [
        {"name": "normalised", "datatype": "FP32", "shape": [1, 3, 8, 9], "data": [0.0] * 216}
    ],
    "from 0 to 1": [
        {"name": "pixels_fp32", "datatype": "FP32", "shape": [1, 8, 8, 3], "data": [255.0] * 192}
    ],
    "(pixel / 255 - mean) / std with mean [0.5, 0.5, 0.5]": [
        {"name": "normalised", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [128.0] * 192}
    ],
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_a_tensor_that_is_not_an_input_is_400_and_says_why(steady: Live, says: str) -> None:
    assert_error(infer(steady, *REFUSED[says]), 400, says=says)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -1.0, 1.01])
@pytest.mark.parametrize("name", ["pixels_fp32", "normalised"])
def test_pixels_that_are_no_pixels_are_400(steady: Live, name: str, value: float) -> None:
    shape = [1, 8, 8, 3] if name == "pixels_fp32" else [1, 3, 8, 8]
    values = np.full(192, 0.5, dtype=np.float32)
    values[100] = value if name == "pixels_fp32" else value * 2 - 1
    tensor = {"name": name, "datatype": "FP32", "shape": shape}
    answer = infer_binary(steady, tensor, values.tobytes())
    assert_error(answer, 400, says="out of range or not finite")
    text = json.dumps({"inputs": [{**tensor, "data": values.tolist()}]})
    answer = steady.http.post(INFER, content=text.encode())
    assert_error(answer, 400, says="out of range or not finite")


PIXELS = {"name": "pixels", "datatype": "UINT8", "shape": [2, 8, 8, 3]}
IMAGE = {"name": "image", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize(
    ("tensor", "binary", "wrong", "says"),
    [
        (PIXELS, bytes(384), {"size": 383}, "384 bytes follow the JSON, and its inputs name 383"),
        (PIXELS, bytes(384), {"size": 385}, "384 bytes follow the JSON, and its inputs name 385"),
        (PIXELS, bytes(384), {"size": 1 << 39}, "bytes follow the JSON"),
        (PIXELS, bytes(384), {"size": 10**30}, "binary_data_size"),
        (PIXELS, bytes(384), {"size": "384"}, "binary_data_size"),
        (PIXELS, bytes(384), {"size": True}, "binary_data_size"),
        (PIXELS, bytes(383), {}, "takes 384 bytes, and 383 were sent"),
        (PIXELS, bytes(385), {}, "takes 384 bytes, and 385 were sent"),
        (PIXELS, bytes(384), {"length": 10**6}, f"{LENGTH} is 1000000, and the body has"),
        (PIXELS, bytes(384), {"length": "10" * 40}, "is not a number of bytes"),
        (PIXELS, bytes(384), {"length": "-1"}, "is not a number of bytes"),
        (PIXELS, bytes(384), {"length": "many"}, "is not a number of bytes"),
        (PIXELS, bytes(384), {"length": 10}, "Invalid JSON"),
        (IMAGE, b"", {}, "takes at least 4 bytes, and 0 were sent"),
        (IMAGE, b"\1\0\0", {}, "takes at least 4 bytes, and 3 were sent"),
        (IMAGE, b"\xff\xff\xff\xffabc", {}, "an element is longer than what was sent"),
        (IMAGE, prefixed(b"a", b"b"), {}, "more was sent than 1 elements"),
        ({**IMAGE, "shape": [2]}, prefixed(b"abcd"), {}, "longer than what was sent"),
    ],
)
def test_binary_sizes_must_add_up(
    steady: Live, tensor: dict[str, Any], binary: bytes, wrong: dict[str, Any], says: str
) -> None:
    assert_error(infer_binary(steady, tensor, binary, **wrong), 400, says=says)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"{}", b'{"inputs": {}}', b'{"inputs": [3]}', b"\xff\xfe",
     b'{"inputs": [], "id": 3}', b'{"inputs": [], "id": "' + b"x" * 1001 + b'"}',
     b'{"inputs": [], "outputs": "label"}', b"[" * 100_000,
     b'{"inputs": [' + b"{}," * 99 + b"{}]}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_400(steady: Live, body: bytes) -> None:
    assert_error(steady.http.post(INFER, content=body), 400)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            [{"name": "boxes"}],
            "there are label, score, task, unknown, unknown_score, ",
        ),
        ([{"name": "label"}, {"name": "label"}], "asked for twice"),
        ([{"name": "label", "parameters": {"classification": 2}}], "probabilities or logits"),
        ([{"name": "logits", "parameters": {"classification": -1}}], "classification"),
        ([{"name": "logits", "parameters": {"binary_data": "yes"}}], "binary_data"),
        ([{}], "outputs.0.name"),
    ],
)
def test_outputs_that_cannot_be_answered_are_400(
    steady: Live, outputs: list[dict[str, Any]], says: str
) -> None:
    assert_error(infer(steady, image_tensor(png()), outputs=outputs), 400, says=says)


def test_json_with_more_values_than_anyone_should_send_is_413(steady: Live) -> None:
    values = b"1," * (MAX_JSON_VALUES + 1)
    body = b'{"inputs": [{"name": "pixels", "data": [' + values + b"1]}]}"
    assert_error(steady.http.post(INFER, content=body), 413, says="as binary data")


def test_the_limits_of_predict_hold_here_too(store: Store, letters: Manifest) -> None:
    limits: dict[str, Any] = {"max_body_bytes": 20_000, "max_images": 2, "max_pixels": 400}
    with live_server(Path(store.location), **limits) as live:
        live.wait_until_ready()
        assert infer(live, image_tensor(png(), png())).status_code == 200
        three = image_tensor(png(), png(), png())
        assert_error(infer(live, three), 413, says="more than 2 images")
        pixels = {"name": "pixels", "datatype": "UINT8", "shape": [1, 21, 20, 3]}
        assert_error(infer_binary(live, pixels, bytes(1260)), 413, says="20×21")
        assert_error(infer(live, image_tensor(png(size=21))), 413, says="21×21")
        assert_error(live.http.post(INFER, content=b"x" * 20_001), 413, says="20000 bytes")
        chunks = (b"x" * 1000 for _ in range(1000))
        assert_error(live.http.post(INFER, content=chunks), 413, says="20000 bytes")
        packed = gzip.compress(json.dumps({"inputs": [], "id": "x" * 20_000}).encode())
        answer = live.http.post(INFER, content=packed, headers={"Content-Encoding": "gzip"})
        assert_error(answer, 413, says="20000 bytes")


PACKED = gzip.compress(json.dumps({"inputs": [image_tensor(png())]}).encode(), mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "says"),
    [
        ("gzip", PACKED, 200, ""),
        ("GZIP", PACKED, 200, ""),
        ("gzip", PACKED[:-4], 400, "ends too early"),
        ("gzip", PACKED + b"more", 400, "goes on after its gzip has ended"),
        ("gzip", b"{}", 400, "is not gzip"),
        ("br", PACKED, 415, "'br' is not accepted"),
        ("gzip, gzip", PACKED, 415, "is not accepted"),
    ],
)
def test_a_compressed_body_is_whole_or_refused(
    steady: Live, encoding: str, body: bytes, status: int, says: str
) -> None:
    answer = steady.http.post(INFER, content=body, headers={"Content-Encoding": encoding})
    if status == 200:
        assert answer.status_code == 200, answer.text
    else:
        assert_error(answer, status, says=says)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/dne/versions/9/infer", 404),
        ("/v2/models/dne/versions/0/infer", 400),
        ("/v2/models/dne/versions/99999999999999999999/infer", 400),
        ("/v2/models/dne/versions/..%2f..%2fstore.json/infer", 404),
        ("/v2/models/..%2fdne/infer", 404),
        ("/v2/models/DNE/infer", 404),
        ("/v2/models//infer", 404),
        ("/v2/models/dne/explain", 404),
        ("/v2/anything", 404),
        ("/v2/health/live", 405),
    ],
)
def test_what_is_not_there_is_refused_in_the_protocols_form(
    steady: Live, path: str, status: int
) -> None:
    assert_error(infer(steady, image_tensor(png()), path=path), status)


def test_outside_of_the_protocol_refusals_keep_their_own_form(steady: Live) -> None:
    for path in ("/v2x", "/predict", "/versions/9"):
        assert steady.http.get(path).headers["content-type"] == "application/problem+json"
