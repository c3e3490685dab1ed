"""Define the routes of the inbox, of advice and of corrections. All need the scope `label`."""

from __future__ import annotations

import asyncio
import base64
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from dne_serve.access.permission import Permission
from dne_serve.engines.base import Floats
from dne_serve.errors import (
    DecoderUnavailable,
    NotKept,
    NotOffered,
    NotReady,
    Stopped,
    WaitedTooLong,
    public_message,
)
from dne_serve.http.bodies import IMAGES
from dne_serve.http.openapi import problems
from dne_serve.http.pages import PICTURE
from dne_serve.http.routes import JSON, PREDICT_BODY
from dne_serve.http.schemas import NearImage
from dne_serve.http.scoped_route import FACTS, Parts, actor_of, json_only, needing, taking
from dne_serve.http.uploads import read_uploads
from dne_serve.inference.decoding import EncodedImage
from dne_serve.inference.nearest import MAX_WHY
from dne_serve.loop.groups import group
from dne_serve.loop.schemas import (
    AdviceAnswer,
    AdviceLine,
    AlikeAnswer,
    AlikeItem,
    CorrectionAnswer,
    CorrectionBody,
    DeletedAnswer,
    ExamplePicture,
    ExamplesAnswer,
    FeedbackBody,
    GroupAnswer,
    GroupsAnswer,
    InboxAnswer,
    ItemAnswer,
    ItemHistoryAnswer,
    JudgementAnswer,
    KeptAnswer,
    KeptImageAnswer,
    LabelBody,
    LabelledAnswer,
    LabelText,
    TaughtAnswer,
    TaughtPicture,
    ToldAdvice,
)
from dne_serve.loop.writer import (
    TAUGHT,
    InboxWriter,
    KeepCandidate,
    Settled,
    Taught,
    unpack_direction,
)
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.errors import (
    DneError,
    ImageRejected,
    ItemNotFound,
    KeptTooLarge,
    LabelledOtherwise,
    LabelsFull,
    ShardForgotten,
    StoreNotFound,
)
from model_store.loop.corrections import KeptImage, correct, kept_images
from model_store.loop.describe import (
    describe_correction,
    describe_item,
    describe_label,
)
from model_store.loop.inbox import Judgement
from model_store.loop.index import STATES, Order, State
from model_store.loop.item_names import new_id
from model_store.loop.items import Item, read_items
from model_store.preprocess import Thumbnail
from model_store.records.manifest import Manifest
from model_store.records.sealing import MAX_VERSION
from model_store.report.advice import Advice, lines, read_advice
from model_store.store.shard import read_kept
from model_store.store.store import Store

MAX_EXAMPLES = 4


def read_examples(store: Store, manifest: Manifest, label: str) -> tuple[list[Thumbnail], str]:
    """Read a few kept images of a class, or return the reason why there are none. Take the first
    images of the trainer's memory, which are the most typical, or else held-out images."""
    if label not in manifest.classes:
        raise NotOffered(f"version {manifest.version} has no class {label[:200]!r}")
    entries = (*manifest.held_out, *manifest.memory)
    kept = {entry.class_name: entry for entry in entries if entry.count}
    entry = kept.get(label)
    if entry is None:
        return [], "No image of this class is kept."
    try:
        images = read_kept(store.read_stored_shard, entry)
    except ShardForgotten:
        return [], "The images of this class were forgotten."
    except KeptTooLarge:
        return [], "The kept images of this class are too large to show."
    try:
        return [Thumbnail.of(image) for image in images[:MAX_EXAMPLES]], ""
    except ImageRejected:
        return [], "The kept images of this class cannot be decoded."


DEFAULT_LISTED = 100
MAX_LISTED = 500
MAX_GROUPED = 1000
"""Grouping this many items takes a second; the time grows with the square."""
PICTURE_HEADERS = {
    "Cache-Control": "private, max-age=3600",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
}

labelling = APIRouter(
    route_class=needing(Permission.LABEL),
    dependencies=[Depends(json_only)],
    responses=problems(400, 404, 503),
    tags=["inbox"],
)
_MAX_KEPT = 50
_DEFAULT_ALIKE, _MAX_ALIKE = 20, 100
Digest = Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")]
ItemPath = Annotated[str, Path(max_length=100)]


@labelling.get("/inbox")
def list_inbox(
    serving: Parts,
    order: Annotated[
        Order, Query(description="What comes first; uncertain is the least certain.")
    ] = "newest",
    state: Annotated[
        list[State] | None, Query(description="Only items in these states; without it all.")
    ] = None,
    cursor: Annotated[
        str | None, Query(max_length=100, description="The next_cursor of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED,
) -> InboxAnswer:
    """List pictures that were kept, a page at a time. There are none before there is a store."""
    collecting = serving.collector is not None
    try:
        index = serving.inbox_handle.index
    except StoreNotFound:
        nothing = dict.fromkeys(STATES, 0)
        return InboxAnswer(
            items=[], counts=nothing, total=0, next_cursor=None, collecting=collecting
        )
    index.refresh()
    page = index.page(order=order, states=state or STATES, cursor=cursor, limit=limit)
    items = [_item_answer(item) for item in read_items(serving.inbox_handle.inbox, page.rows)]
    return InboxAnswer(
        items=items,
        counts=index.counts(),
        total=len(index),
        next_cursor=page.next_cursor,
        collecting=collecting,
    )


@labelling.get("/inbox/groups")
def list_groups(
    serving: Parts,
    state: Annotated[State, Query(description="Only items in this state.")] = "unlabelled",
    limit: Annotated[
        int, Query(ge=1, le=MAX_GROUPED, description="How many items, the newest of them.")
    ] = MAX_GROUPED,
) -> GroupsAnswer:
    """Group the newest items that look alike, so that many images of one class are labelled at
    once."""
    collecting = serving.collector is not None
    try:
        index = serving.inbox_handle.index
    except StoreNotFound:
        nothing = dict.fromkeys(STATES, 0)
        return GroupsAnswer(
            groups=[], others=[], by="labels", counts=nothing, total=0, collecting=collecting
        )
    index.refresh()
    rows = index.page(states=[state], limit=limit).rows
    grouped = group(list(read_items(serving.inbox_handle.inbox, rows)))
    return GroupsAnswer(
        groups=[
            GroupAnswer(items=[_item_answer(item) for item in items]) for items in grouped.groups
        ],
        others=[_item_answer(item) for item in grouped.others],
        by=grouped.by,
        counts=index.counts(),
        total=len(index),
        collecting=collecting,
    )


@labelling.get("/inbox/{item}")
def show_item(serving: Parts, item: ItemPath) -> ItemHistoryAnswer:
    """Describe an item with all its label records."""
    inbox = serving.inbox_handle.inbox
    record, history = inbox.item(item), inbox.history(item)
    described = describe_item(Item(record=record, head=history[-1] if history else None))
    judgements = [JudgementAnswer(**describe_label(judged)) for judged in history]
    return ItemHistoryAnswer(**described, history=judgements)


@labelling.get("/inbox/{item}/alike")
async def list_alike(
    serving: Parts,
    item: ItemPath,
    limit: Annotated[int, Query(ge=1, le=_MAX_ALIKE)] = _DEFAULT_ALIKE,
) -> AlikeAnswer:
    """List the newest items and the kept images that look most like an item. The served version
    sees the picture for it, and counts no answer."""
    picture = await serving.readers.run(lambda: _picture_of(serving, item))
    chosen = await serving.predictor.resolve(None)
    upload = EncodedImage(filename=None, data=picture)
    asked = Chosen(resident=chosen.resident, by="asked")
    (scored,) = scores = await serving.predictor.score(
        asked, pictures=[upload], is_traffic=False, wants_tokens=True
    )
    kept = await serving.nearest.of(chosen.resident, scores, count=min(limit, MAX_WHY))
    assert scored.token is not None, "it was asked for"
    token = scored.token
    items = await serving.readers.run(lambda: _alike(serving, token, but=item, limit=limit))
    return AlikeAnswer(items=items, kept=[NearImage(**near) for near in kept[0]])


def _picture_of(serving: Serving, item: str) -> bytes:
    inbox = serving.inbox_handle.inbox
    return inbox.picture(inbox.item(item))


def _alike(serving: Serving, token: Floats, *, but: str, limit: int) -> list[AlikeItem]:
    """Compare with the newest items, as many as are grouped."""
    index = serving.inbox_handle.index
    index.refresh()
    own = token / max(float(np.linalg.norm(token)), 1e-12)
    found: list[tuple[float, Item]] = []
    for one in read_items(serving.inbox_handle.inbox, index.page(limit=MAX_GROUPED).rows):
        if one.record.token is None or one.record.id == but:
            continue
        other = unpack_direction(one.record.token)
        if len(other) == len(own):
            found.append((float(own @ other) / max(float(np.linalg.norm(other)), 1e-12), one))
    found.sort(key=lambda pair: -pair[0])
    return [
        AlikeItem(similarity=round(similarity, 4), item=_item_answer(one))
        for similarity, one in found[:limit]
    ]


@labelling.get("/inbox/{item}/image", response_class=Response, responses=PICTURE)
def show_picture(serving: Parts, item: ItemPath) -> Response:
    """Return the picture of an item: a JPEG or PNG of at most 512 pixels a side."""
    inbox = serving.inbox_handle.inbox
    record = inbox.item(item)
    headers = {**PICTURE_HEADERS, "ETag": f'"{record.picture.sha256}"'}
    return Response(inbox.picture(record), media_type=record.picture.type, headers=headers)


@labelling.post("/inbox/{item}/label", responses=problems(409, 415, 422))
def label_item(request: Request, serving: Parts, item: ItemPath, body: LabelBody) -> LabelledAnswer:
    """Name the class of a picture, or say that its answer is wrong, or that it is useless."""
    return _judge(request, serving, item, body.judgement(), after=body.after)


@labelling.delete("/inbox/{item}")
def delete_item(request: Request, serving: Parts, item: ItemPath) -> DeletedAnswer:
    """Delete an item with its picture and its labels. The store keeps only a mark of its id for
    two days, so that no server keeps the picture again. The audit log names the actor."""
    inbox = serving.inbox_handle.inbox
    request.scope[FACTS].update(item=item)  # also of a deletion that fails half-way
    inbox.item(item)
    if serving.collector is not None:
        serving.collector.drop(item)
    inbox.delete(item)
    serving.inbox_handle.index.deleted(item)
    return DeletedAnswer(id=item, deleted=True)


@labelling.post("/feedback", responses=problems(409, 415, 422))
def feedback(request: Request, serving: Parts, body: FeedbackBody) -> LabelledAnswer:
    """Say that a prediction was wrong, or name the true class. A picture that no rule has kept is
    kept now, if this server answered it a short time ago."""
    judgement = body.judgement()
    kept = serving.collector.keep(body.id) if serving.collector is not None else None
    if kept is not None:
        try:
            kept.result(serving.settings.max_wait_seconds)
        except FutureTimeout as error:
            raise WaitedTooLong("the picture was not written in time; try again soon") from error
    return _judge(request, serving, body.id, judgement, after=None)


@labelling.get("/classes/examples", response_model=ExamplesAnswer)
def show_examples(
    serving: Parts,
    label: Annotated[LabelText, Query(description="The name of a class of the served version.")],
) -> Response:
    """Show a few kept images of a class of the served version, to compare an image with before it
    gets that label."""
    if serving.loaded.served is None:
        raise NotReady("no version is served yet")
    manifest = serving.loaded.served.manifest
    thumbnails, note = read_examples(serving.open_store(), manifest, label)
    pictures = [
        ExamplePicture(type=thumbnail.type, data=base64.b64encode(thumbnail.data).decode())
        for thumbnail in thumbnails
    ]
    answer = ExamplesAnswer(version=manifest.version, label=label, pictures=pictures, note=note)
    headers = {"Cache-Control": "no-store"}  # a class may be forgotten
    return Response(answer.model_dump_json(), media_type=JSON, headers=headers)


@labelling.get("/versions/{version}/advice")
def show_advice(
    serving: Parts, version: Annotated[int, Path(ge=1, le=MAX_VERSION)]
) -> AdviceAnswer:
    """Advise what would help a version most: more images of a class, labels to look at, copies
    among its held-out images. The advice has file names, so it needs the scope label."""
    store = serving.open_store()
    advice = read_advice(store, store.manifest(version))
    if advice is None:
        return AdviceAnswer(version=version, advice=None)
    advised = [AdviceLine(text=line.text, images=list(line.images)) for line in lines(advice)]
    members = {name: getattr(advice, name) for name in Advice.model_fields}
    return AdviceAnswer(version=version, advice=ToldAdvice(**members, lines=advised))


@labelling.get("/versions/{version}/kept")
def list_kept(
    serving: Parts,
    version: Annotated[int, Path(ge=1, le=MAX_VERSION)],
    label: Annotated[LabelText, Query(description="The name of a class of the version.")],
    image: Annotated[
        list[Digest] | None,
        Query(max_length=_MAX_KEPT, description="Only images with these digests."),
    ] = None,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MAX_KEPT)] = _MAX_KEPT,
) -> Response:
    """Show images that a version keeps of a class: those to learn from, then those to judge by."""
    store = serving.open_store()
    manifest = store.manifest(version)
    if label not in manifest.spec.classes:
        raise NotOffered(f"version {version} has no class {label[:200]!r}")
    kept = list(kept_images(store, manifest, label))
    wanted = [one for one in kept if image is None or one.sha256 in image]
    shown = [_kept_answer(one) for one in wanted[offset : offset + limit]]
    answer = KeptAnswer(version=version, label=label, total=len(wanted), images=shown)
    headers = {"Cache-Control": "no-store"}  # a class may be forgotten
    return Response(answer.model_dump_json(), media_type=JSON, headers=headers)


def _kept_answer(kept: KeptImage) -> KeptImageAnswer:
    try:
        shown = Thumbnail.of(kept.data)
    except ImageRejected:
        return KeptImageAnswer(sha256=kept.sha256, name=kept.name, type=None, data=None)
    data = base64.b64encode(shown.data).decode()
    return KeptImageAnswer(sha256=kept.sha256, name=kept.name, type=shown.type, data=data)


@labelling.post("/corrections", responses=problems(409, 415, 422))
def correct_image(request: Request, serving: Parts, body: CorrectionBody) -> CorrectionAnswer:
    """Move an image that the channel's version keeps to another class, or take it out. The next
    job learns it."""
    store = serving.open_store()
    head = store.head(serving.settings.channel)
    if head is None:
        raise NotReady("no version is served yet")
    request.scope[FACTS].update(said=body.to or "taken out", image=body.image)
    record = correct(
        store,
        store.resolve(head),
        image=body.image,
        label=body.label,
        to=body.to,
        actor=actor_of(request),
        reason=body.reason,
    )
    return CorrectionAnswer(**describe_correction(record))


def _judge(
    request: Request, serving: Serving, item: str, judgement: Judgement, *, after: int | None
) -> LabelledAnswer:
    facts = request.scope[FACTS]
    facts.update(item=item, said=judgement.label or judgement.kind)
    record = serving.inbox_handle.inbox.judge(item, judgement, actor=actor_of(request), after=after)
    facts.update(record=record.number)
    serving.inbox_handle.index.judged(record)
    return LabelledAnswer(id=item, **describe_label(record))


def _item_answer(item: Item) -> ItemAnswer:
    return ItemAnswer(**describe_item(item))


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


_LATE = "the server had no time for it; send it again"
_FULL = "too many pictures wait to be written; send it again"
