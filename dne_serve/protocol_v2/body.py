"""Parse and write bodies: JSON, and the binary tensors that may follow it. Inputs are hostile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from dne_serve.errors import Malformed, TooLarge
from dne_serve.http.bodies import check_json
from dne_serve.inference.answers import list_json
from dne_serve.protocol_v2.schemas import (
    MAX_JSON_VALUES,
    InferenceAnswer,
    InferenceRequest,
    RequestInput,
    RequestOutput,
)
from dne_serve.protocol_v2.tensors import Encoded, Tensor
from model_store.records.sealing import first_reason

HEADER_LENGTH = "Inference-Header-Content-Length"
MOST_LIKELY_SHORT = 64
"""Characters of a client's own text that an error repeats."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An inference request: its tensors, and the outputs that it asks for."""

    id: str | None
    tensors: tuple[Tensor, ...]
    outputs: tuple[RequestOutput, ...]
    binary: bool
    """True if outputs travel as binary unless they say otherwise."""


def unpack(body: bytes, *, header_length: str | None) -> Asked:
    """Parse a body. The JSON ends after `header_length` bytes; 0 says that all is one image."""
    length = _length(header_length, of=body)
    if header_length is not None and length == 0:
        return Asked(id=None, tensors=(_one_image(body),), outputs=(), binary=False)
    request = parse(body[:length], InferenceRequest)
    return Asked(
        id=request.id,
        tensors=_tensors(request.inputs, memoryview(body)[length:]),
        outputs=tuple(request.outputs),
        binary=request.parameters.binary_data_output,
    )


def parse(text: bytes, model: type[Model]) -> Model:
    """Parse a JSON text. Refuse one that is too much before it is parsed."""
    try:
        check_json(text, max_values=MAX_JSON_VALUES)
    except TooLarge as error:
        raise TooLarge(f"{error}: send large tensors as binary data") from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise Malformed(first_reason(error)) from error


def pack(answer: InferenceAnswer, *, outputs: Sequence[Encoded]) -> Response:
    """Write JSON, and after it the binary tensors in the order of its outputs. `outputs` has the
    values of the answer's outputs."""
    text = _written(answer, outputs)
    tensors = [output.binary for output in outputs if output.binary is not None]
    if not tensors:
        return Response(text, media_type="application/json")
    return Response(
        b"".join([text, *tensors]),
        media_type="application/octet-stream",
        headers={HEADER_LENGTH: str(len(text))},
    )


def _written(answer: InferenceAnswer, outputs: Sequence[Encoded]) -> bytes:
    """Write the JSON in pieces: a model that held all values would be written in one go."""
    heads = [
        head.model_dump_json(exclude_none=True).encode()
        if values.data is None
        else b"".join((_open(head), b',"data":', list_json(values.data), b"}"))
        for head, values in zip(answer.outputs, outputs, strict=True)
    ]
    named = _open(answer.model_copy(update={"outputs": []})).removesuffix(b"]")
    return b"".join((named, b",".join(heads), b"]}"))


def _open(model: BaseModel) -> bytes:
    """Write a JSON object without its last brace."""
    return model.model_dump_json(exclude_none=True).encode().removesuffix(b"}")


def _length(header: str | None, *, of: bytes) -> int:
    if header is None:
        return len(of)
    # More digits than any body has bytes are not worth turning into a number.
    if not (header.isascii() and header.isdigit() and len(header) <= 20):
        raise Malformed(f"{HEADER_LENGTH} {header[:MOST_LIKELY_SHORT]!r} is not a number of bytes")
    if int(header) > len(of):
        raise Malformed(f"{HEADER_LENGTH} is {int(header)}, and the body has {len(of)} bytes")
    return int(header)


def _one_image(body: bytes) -> Tensor:
    """Make a raw binary body the only element of the only BYTES input."""
    prefixed = len(body).to_bytes(4, "little") + body
    return Tensor(
        name="image", datatype="BYTES", shape=(1,), binary=memoryview(prefixed), data=None
    )


def _tensors(inputs: Sequence[RequestInput], binary: memoryview) -> tuple[Tensor, ...]:
    """Give each input its share of `binary`, in order. Together they take all of it."""
    tensors = []
    at = 0
    for given in inputs:
        size = given.parameters.binary_data_size
        if given.parameters.shared_memory_region is not None:
            raise Malformed("shared memory is not offered: send the tensor in the request")
        if (size is None) == (given.data is None):
            raise Malformed(
                f"input {given.name[:MOST_LIKELY_SHORT]!r} needs either data or binary_data_size"
            )
        end = at + (size or 0)
        if end > len(binary):
            raise Malformed(f"{len(binary)} bytes follow the JSON, and its inputs name {end}")
        tensors.append(
            Tensor(
                name=given.name,
                datatype=given.datatype,
                shape=tuple(given.shape),
                binary=None if size is None else binary[at:end],
                data=given.data,
            )
        )
        at = end
    if at != len(binary):
        raise Malformed(f"{len(binary)} bytes follow the JSON, and its inputs name {at}")
    return tuple(tensors)
