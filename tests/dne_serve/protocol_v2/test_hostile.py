"""Whatever is sent to infer, the answer is an answer or a refusal, never a failure."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from tritonclient.http import InferResult

from dne_serve.errors import Malformed, TooLarge
from dne_serve.protocol_v2.answers import OUTPUTS, check_requested
from dne_serve.protocol_v2.images import INPUTS, Output, encode, pictures_of
from dne_serve.protocol_v2.infer import HEADER_LENGTH, pack, unpack
from dne_serve.protocol_v2.schemas import InferenceAnswer, ResponseOutput
from model_store.errors import ImageRejected
from model_store.preprocess import Pixels, fit_pixels, read_pixels
from model_store.records.manifest import Preprocessing
from tests.live_server import Live, png

PREPROCESSING = Preprocessing(image_size=8)
IMAGE = png()
BINARY = len(IMAGE).to_bytes(4, "little") + IMAGE

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 300),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.5, 1, 3, 8, 192, 384]),
)
anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
shapes = st.one_of(
    st.sampled_from([[1], [1, 1], [2], [1, 8, 8, 3], [2, 8, 8, 3], [1, 9, 7, 3], [1, 3, 8, 8]]),
    st.lists(st.integers(-2, 9), max_size=6),
    st.lists(st.integers(), max_size=3),
)
names = st.sampled_from([*INPUTS, "input0", ""])
datatypes = st.sampled_from(["BYTES", "UINT8", "FP32", "FP64", "BOOL", "", "bytes"])
data = st.one_of(
    st.lists(numbers, min_size=192, max_size=192),
    st.lists(st.text(max_size=4), max_size=3),
    st.integers(0, 255).map(lambda value: [[[[value] * 3] * 8] * 8]),
    anything,
)
tensors = st.fixed_dictionaries(
    {"name": names, "shape": shapes, "datatype": datatypes},
    optional={
        "data": data,
        "parameters": st.one_of(
            st.fixed_dictionaries({"binary_data_size": st.one_of(numbers, anything)}), anything
        ),
    },
)
outputs = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from([*OUTPUTS, "boxes"])},
        optional={
            "parameters": st.fixed_dictionaries(
                {}, optional={"binary_data": anything, "classification": anything}
            )
        },
    ),
    max_size=3,
)
requests = st.one_of(
    st.fixed_dictionaries(
        {"inputs": st.lists(tensors, max_size=2)},
        optional={"outputs": st.one_of(outputs, anything), "id": anything, "parameters": anything},
    ),
    anything,
)


@st.composite
def hostile_bodies(draw: st.DrawFn) -> tuple[bytes, str | None]:
    """A body and its header: JSON and binary that are nearly right, or not at all."""
    text = json.dumps(draw(requests)).encode()
    tail = draw(st.one_of(st.just(b""), st.just(BINARY), st.binary(max_size=800)))
    body = draw(st.one_of(st.just(text + tail), st.just(text), st.binary(max_size=64)))
    length = draw(
        st.one_of(st.none(), st.just(str(len(text))), st.integers().map(str), st.text(max_size=4))
    )
    return body, length


@st.composite
def bent_bodies(draw: st.DrawFn) -> tuple[bytes, str | None]:
    """A request that is right but for one thing."""
    tensor: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"name": "image", "shape": [1], "datatype": "BYTES"},
                {"name": "pixels", "shape": [2, 8, 8, 3], "datatype": "UINT8"},
                {"name": "pixels_fp32", "shape": [1, 4, 8, 3], "datatype": "FP32"},
                {"name": "normalised", "shape": [1, 3, 8, 8], "datatype": "FP32"},
            ]
        )
    )
    tail = {"image": BINARY, "pixels": bytes(384), "pixels_fp32": bytes(384)}.get(
        tensor["name"], bytes(768)
    )
    size: Any = len(tail)
    bend = draw(st.sampled_from(["shape", "size", "datatype", "name", "tail", "nothing"]))
    if bend == "shape":
        tensor = {**tensor, "shape": draw(shapes)}
    elif bend in ("datatype", "name"):
        tensor = {**tensor, bend: draw({"datatype": datatypes, "name": names}[bend])}
    elif bend == "size":
        size = draw(st.one_of(st.integers(), anything))
    elif bend == "tail":
        tail = bytes(draw(st.binary(min_size=len(tail), max_size=len(tail))))
    tensor = {**tensor, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor], "outputs": [{"name": "logits"}]}).encode()
    return text + tail, str(len(text))


class DecodesHere:
    """As the server's decoder, without its threads and processes."""

    async def read(self, data: bytes, preprocessing: Preprocessing) -> Pixels:
        return read_pixels(data, preprocessing, max_pixels=10_000)

    async def fit(self, pixels_HWC: Pixels, preprocessing: Preprocessing) -> Pixels:
        return fit_pixels(pixels_HWC, preprocessing)


HERE: Any = DecodesHere()


def read(body: bytes, length: str | None) -> None:
    """All that happens to a request before it is queued."""
    asked = unpack(body, header_length=length)
    check_requested(asked.outputs)
    for picture in pictures_of(asked.tensors, preprocessing=PREPROCESSING, max_images=64):
        pixels = asyncio.run(picture.read(HERE, PREPROCESSING))
        assert pixels.shape == (8, 8, 3)
        assert pixels.dtype == np.uint8


@pytest.mark.long
@settings(max_examples=250)
@given(st.one_of(hostile_bodies(), bent_bodies()))
def test_reading_a_request_refuses_or_gives_pixels(sent: tuple[bytes, str | None]) -> None:
    said = "an answer"
    try:
        read(*sent)
    except (Malformed, TooLarge, ImageRejected) as refusal:
        said = str(refusal)
    assert 0 < len(said) < 1000


@settings(max_examples=80)
@given(sent=st.one_of(hostile_bodies(), bent_bodies()))
def test_no_request_makes_the_server_fail(steady: Live, sent: tuple[bytes, str | None]) -> None:
    body, length = sent
    carried = length is not None and length.isascii() and length.isprintable()
    headers = {HEADER_LENGTH: length.strip()} if length is not None and carried else {}
    answer = steady.http.post("/v2/models/dne/infer", content=body, headers=headers)
    assert answer.status_code in (200, 400, 413, 422), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]


def test_the_strategies_also_make_requests_that_are_answered() -> None:
    """Otherwise the tests above would try nothing but refusals."""
    for name in INPUTS:
        body, length = find(bent_bodies(), partial(_is_read, name=name))
        assert unpack(body, header_length=length).tensors[0].name == name


def _is_read(sent: tuple[bytes, str | None], *, name: str) -> bool:
    body, length = sent
    try:
        read(body, length)
    except (Malformed, TooLarge, ImageRejected):
        return False
    return f'"{name}"'.encode() in body


@pytest.mark.parametrize("binary", [True, False])
@given(
    floats=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    texts=st.lists(st.text(), min_size=1),
    flags=st.lists(st.booleans(), min_size=1),
)
def test_every_output_arrives_as_it_was(
    binary: bool, floats: list[float], texts: list[str], flags: list[bool]
) -> None:
    sent_floats = np.array(floats, dtype=np.float32)
    tensors = [
        Output(name="f", datatype="FP32", shape=(len(floats),), values=sent_floats),
        Output(name="t", datatype="BYTES", shape=(len(texts), 1), values=texts),
        Output(name="b", datatype="BOOL", shape=(len(flags),), values=np.array(flags)),
    ]
    encoded = [encode(tensor, binary=binary) for tensor in tensors]
    heads = [
        ResponseOutput(
            name=tensor.name,
            shape=list(tensor.shape),
            datatype=tensor.datatype,
            parameters={"binary_data_size": len(one.binary)} if one.binary is not None else None,
            data=one.data,
        )
        for tensor, one in zip(tensors, encoded, strict=True)
    ]
    answer = InferenceAnswer(model_name="m", model_version="1", outputs=heads)
    sent = pack(answer, outputs=encoded)
    length = sent.headers.get(HEADER_LENGTH)
    result = InferResult.from_response_body(
        bytes(sent.body), header_length=int(length) if length else None
    )
    assert result.as_numpy("f").tolist() == sent_floats.tolist()
    found = result.as_numpy("t").ravel().tolist()
    assert [one.decode() if binary else one for one in found] == texts
    assert result.as_numpy("b").tolist() == flags
