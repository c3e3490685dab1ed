"""Answer inference requests: bodies to tensors, tensors to images, logits to tensors.

One version answers each request. Bodies are JSON, and the binary tensors that may follow it; they
are hostile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dne_serve.access.permission import Permission
from dne_serve.engines.base import Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import Malformed, TooLarge
from dne_serve.http.bodies import AT_ONCE_BYTES, IMAGES, check_json
from dne_serve.http.scoped_route import Parts, taking
from dne_serve.inference.answers import SCORE_WORK, list_json, work_of
from dne_serve.inference.decoding import Picture
from dne_serve.inference.predictor import at_least_of
from dne_serve.inference.store_threads import ARRIVED
from dne_serve.protocol_v2 import describe
from dne_serve.protocol_v2.answers import (
    EVERY_OUTPUT,
    Answers,
    check_requested,
    count_json_values,
    is_binary,
    output_of,
)
from dne_serve.protocol_v2.images import Encoded, Tensor, encode, pictures_of
from dne_serve.protocol_v2.openapi import (
    INFER_ANSWER,
    INFER_BODY,
    ThisModel,
    Version,
    refusals,
    router,
)
from dne_serve.protocol_v2.schemas import (
    MAX_JSON_VALUES,
    InferenceAnswer,
    InferenceRequest,
    RequestInput,
    RequestOutput,
    ResponseOutput,
)
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.records.manifest import Preprocessing
from model_store.records.sealing import first_reason

HEADER_LENGTH = "Inference-Header-Content-Length"
_MOST_LIKELY_SHORT = 64
"""Characters of a client's own text that an error repeats."""

Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """An inference request: its tensors, and the outputs that it asks for."""

    id: str | None
    tensors: tuple[Tensor, ...]
    outputs: tuple[RequestOutput, ...]
    binary: bool
    """True if outputs travel as binary unless they say otherwise."""


def unpack(body: bytes, *, header_length: str | None) -> ParsedRequest:
    """Parse a body. The JSON ends after `header_length` bytes; 0 says that all is one image."""
    length = _length(header_length, of=body)
    if header_length is not None and length == 0:
        return ParsedRequest(id=None, tensors=(_one_image(body),), outputs=(), binary=False)
    request = parse(body[:length], InferenceRequest)
    return ParsedRequest(
        id=request.id,
        tensors=_tensors(request.inputs, memoryview(body)[length:]),
        outputs=tuple(request.outputs),
        binary=request.parameters.binary_data_output,
    )


def parse(text: bytes, model: type[Parsed]) -> Parsed:
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
        raise Malformed(f"{HEADER_LENGTH} {header[:_MOST_LIKELY_SHORT]!r} is not a number of bytes")
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
                f"input {given.name[:_MOST_LIKELY_SHORT]!r} needs either data or binary_data_size"
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


predicting = router(Permission.PREDICT)


@predicting.post(
    "/models/{model}/infer",
    dependencies=[ThisModel],
    openapi_extra=INFER_BODY,
    responses={**INFER_ANSWER, **refusals(400, 404, 415, 422, 503)},
)
@taking(IMAGES)
async def infer(request: Request, serving: Parts) -> Response:
    """Classify one or many images by the served version."""
    return await _infer(request, serving, version=None)


@predicting.post(
    "/models/{model}/versions/{version}/infer",
    dependencies=[ThisModel],
    openapi_extra=INFER_BODY,
    responses={**INFER_ANSWER, **refusals(400, 404, 415, 422, 503)},
)
@taking(IMAGES)
async def infer_by_version(request: Request, serving: Parts, version: Version) -> Response:
    """Classify one or many images by any version in the store."""
    return await _infer(request, serving, version=version)


async def _infer(request: Request, serving: Serving, *, version: int | None) -> Response:
    serving.predictor.expect_room()
    chosen = await _resolve(serving, version, at_least=at_least_of(request))
    resident = chosen.resident
    asked, pictures = await _read(request, serving, resident.manifest.preprocessing)
    classes = len(resident.labels)
    values = count_json_values(
        asked.outputs, images=len(pictures), classes=classes, binary=asked.binary
    )
    since = request.scope.get(ARRIVED)
    scored = await serving.predictor.score(chosen, pictures=pictures, since=since)
    build = partial(_answer, asked, resident, scored, model_name=serving.settings.model_name)
    work = work_of(len(pictures), classes=classes, listed=0) + SCORE_WORK * values
    return await serving.answers.build(build, work=work)


async def _resolve(serving: Serving, version: int | None, *, at_least: int | None) -> Chosen:
    if serving.reloader.withdrawn or (version is None and serving.loaded.served is None):
        raise describe.why_not_ready(serving)
    return await serving.predictor.resolve(version, at_least=at_least)


async def _read(
    request: Request, serving: Serving, preprocessing: Preprocessing
) -> tuple[ParsedRequest, list[Picture]]:
    """Parse the body. Raise every fault before an image is decoded."""
    body = b"".join([chunk async for chunk in request.stream()])

    def read() -> tuple[ParsedRequest, list[Picture]]:
        asked = unpack(body, header_length=request.headers.get(HEADER_LENGTH))
        check_requested(asked.outputs)
        asked = replace(asked, outputs=asked.outputs or EVERY_OUTPUT)
        most = serving.settings.max_images
        return asked, pictures_of(asked.tensors, preprocessing=preprocessing, max_images=most)

    return read() if len(body) <= AT_ONCE_BYTES else await run_in_threadpool(read)


def _answer(
    asked: ParsedRequest, resident: Resident, scored: Sequence[Scored], *, model_name: str
) -> Response:
    answers = Answers(resident, scored)
    heads, encoded = [], []
    for wanted in asked.outputs:
        parameters = wanted.parameters
        output = output_of(answers, name=wanted.name, classification=parameters.classification)
        values = encode(output, binary=is_binary(wanted, otherwise=asked.binary))
        heads.append(
            ResponseOutput(
                name=output.name,
                shape=list(output.shape),
                datatype=output.datatype,
                parameters=None
                if values.binary is None
                else {"binary_data_size": len(values.binary)},
            )
        )
        encoded.append(values)
    answer = InferenceAnswer(
        model_name=model_name, model_version=str(resident.version), id=asked.id, outputs=heads
    )
    return pack(answer, outputs=encoded)
