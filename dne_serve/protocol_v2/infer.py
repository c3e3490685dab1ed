"""Answer inference requests: tensors to images, logits to tensors. One version answers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dne_serve.access.permission import Permission
from dne_serve.engines.base import Resident
from dne_serve.engines.scored import Scored
from dne_serve.http.bodies import AT_ONCE_BYTES, IMAGES
from dne_serve.http.scoped_route import Parts, taking
from dne_serve.inference.answers import SCORE_WORK, work_of
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
from dne_serve.protocol_v2.body import HEADER_LENGTH, Asked, pack, unpack
from dne_serve.protocol_v2.images import pictures_of
from dne_serve.protocol_v2.openapi import (
    INFER_ANSWER,
    INFER_BODY,
    ThisModel,
    Version,
    refusals,
    router,
)
from dne_serve.protocol_v2.schemas import InferenceAnswer, ResponseOutput
from dne_serve.protocol_v2.tensors import encode
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.records.manifest import Preprocessing

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """Bytes of a request, and the header that divides them."""

    data: bytes
    header_length: str | None

    def read(self, preprocessing: Preprocessing, *, max_images: int) -> tuple[Asked, list[Picture]]:
        """Parse the bytes. Raise every fault before an image is decoded."""
        asked = unpack(self.data, header_length=self.header_length)
        check_requested(asked.outputs)
        asked = replace(asked, outputs=asked.outputs or EVERY_OUTPUT)
        pictures = pictures_of(asked.tensors, preprocessing=preprocessing, max_images=max_images)
        return asked, pictures


async def _infer(request: Request, serving: Serving, *, version: int | None) -> Response:
    serving.predictor.expect_room()
    chosen = await _resolve(serving, version, at_least=at_least_of(request))
    resident = chosen.resident
    body = _Body(
        data=b"".join([chunk async for chunk in request.stream()]),
        header_length=request.headers.get(HEADER_LENGTH),
    )
    asked, pictures = await _read(body, serving, resident.manifest.preprocessing)
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
    body: _Body, serving: Serving, preprocessing: Preprocessing
) -> tuple[Asked, list[Picture]]:
    def read() -> tuple[Asked, list[Picture]]:
        return body.read(preprocessing, max_images=serving.settings.max_images)

    return read() if len(body.data) <= AT_ONCE_BYTES else await run_in_threadpool(read)


def _answer(
    asked: Asked, resident: Resident, scored: Sequence[Scored], *, model_name: str
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
