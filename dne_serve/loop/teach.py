"""Take pictures with the name of their class, to be learnt from: the route `POST /inbox`.

The pictures go the way of all pictures of the inbox: through the writer, its limits and its
decoding process. One bad picture does not fail the others, because people send whole folders.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dne_serve.access.permission import Permission
from dne_serve.errors import DecoderUnavailable, NotKept, Stopped, public_message
from dne_serve.http.bodies import IMAGES
from dne_serve.http.openapi import problems
from dne_serve.http.routes import JSON, PREDICT_BODY
from dne_serve.http.scoped_route import FACTS, Parts, actor_of, needing, taking
from dne_serve.http.uploads import read_uploads
from dne_serve.loop.schemas import LabelText, TaughtAnswer, TaughtPicture
from dne_serve.loop.writer import TAUGHT, InboxWriter, KeepCandidate, Settled, Taught
from model_store.errors import DneError, ImageRejected, ItemNotFound, LabelledOtherwise, LabelsFull
from model_store.loop.inbox import Judgement
from model_store.loop.item_names import new_id

_LATE = "the server had no time for it; send it again"
_FULL = "too many pictures wait to be written; send it again"

teaching = APIRouter(route_class=needing(Permission.LABEL), tags=["inbox"])


@teaching.post(
    "/inbox",
    response_model=TaughtAnswer,
    openapi_extra={"requestBody": PREDICT_BODY["requestBody"]},
    responses=problems(400, 406, 408, 415, 422, 503),
)
@taking(IMAGES)
async def teach(
    request: Request,
    serving: Parts,
    label: Annotated[LabelText, Query(description="The name of the class of these pictures.")],
) -> Response:
    """Put pictures with the name of their class into the inbox: a form's `files`, base64 in JSON,
    or one as the raw body. A job then learns them. Makes the store where there is none yet."""
    taught = Taught(judgement=Judgement.of_class(label), actor=actor_of(request))
    uploads = await read_uploads(request, max_images=serving.settings.max_images)
    await serving.labellers.run(serving.open_store.made)
    serving.writer.start()
    until = time.monotonic() + serving.settings.max_wait_seconds
    pictures = [
        await _taught(serving.writer, upload.data, taught, filename=upload.filename, until=until)
        for upload in uploads
    ]
    name = taught.judgement.label or ""
    kept = sum(picture.item is not None for picture in pictures)
    request.scope[FACTS].update(said=name, pictures=len(pictures), kept=kept)
    answer = TaughtAnswer(label=name, pictures=pictures)
    return Response(answer.model_dump_json(), media_type=JSON)


async def _taught(
    writer: InboxWriter, data: bytes, taught: Taught, *, filename: str | None, until: float
) -> TaughtPicture:
    """Hand a picture to the writer, and wait for what becomes of it until the time is up."""

    def said(outcome: str, why: str = "", item: str | None = None) -> TaughtPicture:
        return TaughtPicture.model_validate(
            {"filename": filename, "outcome": outcome, "item": item, "why": why}
        )

    left_s = until - time.monotonic()
    if left_s <= 0:
        return said("refused", _LATE)
    kept: Future[Settled] = Future()
    candidate = KeepCandidate(
        id=new_id(), data=data, given=None, rules=(TAUGHT,), taught=taught, kept=kept
    )
    if not writer.offer(candidate):
        return said("refused", _FULL)
    try:
        settled = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(kept)), left_s)
    except TimeoutError:
        return said("refused", _LATE)
    except ImageRejected as error:
        return said("bad", str(error))
    except LabelledOtherwise as error:
        return said("other", str(error))
    except (DecoderUnavailable, NotKept, Stopped, ItemNotFound, LabelsFull) as error:
        return said("refused", str(error))
    except DneError as error:
        return said("refused", public_message(error))
    return said(settled.outcome, item=settled.item)
