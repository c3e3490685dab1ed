"""Define the routes of the inbox, and of advice. All of them need the scope `label`."""

from __future__ import annotations

import base64
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from dne_serve.access.permission import Permission
from dne_serve.errors import NotReady, WaitedTooLong
from dne_serve.http.openapi import problems
from dne_serve.http.routes import JSON, json_only
from dne_serve.http.scoped_route import Parts, actor_of, needing
from dne_serve.labelling.examples import read_examples
from dne_serve.labelling.groups import group
from dne_serve.labelling.schemas import (
    AdviceAnswer,
    AdviceLine,
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
    LabelBody,
    LabelledAnswer,
    LabelText,
    ToldAdvice,
)
from dne_serve.server import Serving
from model_store.advice.kept import read_advice
from model_store.advice.lines import lines
from model_store.advice.record import Advice
from model_store.inbox.describe import describe_item, describe_label
from model_store.inbox.inbox import Judgement
from model_store.inbox.index import STATES, Order, State
from model_store.inbox.reading import Item, read_items
from model_store.records.fields import MAX_VERSION

DEFAULT_LISTED = 100
MAX_LISTED = 500
MAX_GROUPED = 1000
"""Groups of as many take a second; the time grows with the square."""
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The picture", "content": {"image/jpeg": BINARY, "image/png": BINARY}}
}
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
    """List pictures that were kept, a page at a time."""
    index = serving.desk.index
    index.refresh()
    page = index.page(order=order, states=state or STATES, cursor=cursor, limit=limit)
    items = [_item_answer(item) for item in read_items(serving.desk.inbox, page.rows)]
    return InboxAnswer(
        items=items,
        counts=index.counts(),
        total=len(index),
        next_cursor=page.next_cursor,
        collecting=serving.collector is not None,
    )


@labelling.get("/inbox/groups")
def list_groups(
    serving: Parts,
    state: Annotated[State, Query(description="Only items in this state.")] = "unlabelled",
    limit: Annotated[
        int, Query(ge=1, le=MAX_GROUPED, description="How many items, the newest of them.")
    ] = MAX_GROUPED,
) -> GroupsAnswer:
    """Put the newest items together that look alike, so that a pile of one thing is named at
    once."""
    index = serving.desk.index
    index.refresh()
    rows = index.page(states=[state], limit=limit).rows
    found = group(list(read_items(serving.desk.inbox, rows)))
    return GroupsAnswer(
        groups=[GroupAnswer(items=[_item_answer(one) for one in some]) for some in found.groups],
        others=[_item_answer(one) for one in found.others],
        by=found.by,
        counts=index.counts(),
        total=len(index),
        collecting=serving.collector is not None,
    )


@labelling.get("/inbox/{item}")
def show_item(serving: Parts, item: ItemPath) -> ItemHistoryAnswer:
    """Describe one item with all that was said of it."""
    inbox = serving.desk.inbox
    record, history = inbox.item(item), inbox.history(item)
    found = describe_item(Item(record=record, head=history[-1] if history else None))
    said = [JudgementAnswer(**describe_label(one)) for one in history]
    return ItemHistoryAnswer(**found, history=said)


@labelling.get("/inbox/{item}/image", response_class=Response, responses=PICTURE)
def show_picture(serving: Parts, item: ItemPath) -> Response:
    """Return the picture of an item: a JPEG or PNG of at most 512 pixels a side."""
    inbox = serving.desk.inbox
    record = inbox.item(item)
    headers = {**PICTURE_HEADERS, "ETag": f'"{record.picture.sha256}"'}
    return Response(inbox.picture(record), media_type=record.picture.type, headers=headers)


@labelling.post("/inbox/{item}/label", responses=problems(409, 413, 415, 422))
def label_item(request: Request, serving: Parts, item: ItemPath, body: LabelBody) -> LabelledAnswer:
    """Say of which class a picture is, that its answer is wrong, or that it is of no use."""
    return _judge(request, serving, item, body.judgement(), after=body.after)


@labelling.delete("/inbox/{item}")
def delete_item(request: Request, serving: Parts, item: ItemPath) -> DeletedAnswer:
    """Delete an item with its picture and its labels. Nothing of it stays in the store; the audit
    log says who deleted it."""
    inbox = serving.desk.inbox
    inbox.item(item)
    if serving.collector is not None:
        serving.collector.drop(item)
    inbox.delete(item)
    serving.desk.index.deleted(item)
    serving.audit.note("DELETE /inbox/{item}", who=actor_of(request), item=item)
    return DeletedAnswer(id=item, deleted=True)


@labelling.post("/feedback", responses=problems(413, 415, 422))
def feedback(request: Request, serving: Parts, body: FeedbackBody) -> LabelledAnswer:
    """Say that a prediction was wrong, or name the true class. A picture that no rule kept is kept
    now, if it was answered by this server a short time ago."""
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
    if serving.residents.served is None:
        raise NotReady("no version is served yet")
    manifest = serving.residents.served.manifest
    found, note = read_examples(serving.open_store(), manifest, label)
    pictures = [
        ExamplePicture(type=one.type, data=base64.b64encode(one.data).decode()) for one in found
    ]
    answer = ExamplesAnswer(version=manifest.version, label=label, pictures=pictures, note=note)
    headers = {"Cache-Control": "no-store"}  # a class may be forgotten
    return Response(answer.model_dump_json(), media_type=JSON, headers=headers)


@labelling.get("/versions/{version}/advice")
def show_advice(
    serving: Parts, version: Annotated[int, Path(ge=1, le=MAX_VERSION)]
) -> AdviceAnswer:
    """Say what would help a version most: more images of a class, labels to look at, copies among
    the images that it was judged by. File names are in it, so it needs the scope label."""
    store = serving.open_store()
    advice = read_advice(store, store.manifest(version))
    if advice is None:
        return AdviceAnswer(version=version, advice=None)
    told = [AdviceLine(text=one.text, images=list(one.images)) for one in lines(advice)]
    members = {name: getattr(advice, name) for name in Advice.model_fields}
    return AdviceAnswer(version=version, advice=ToldAdvice(**members, lines=told))


def _judge(
    request: Request, serving: Serving, item: str, judgement: Judgement, *, after: int | None
) -> LabelledAnswer:
    record = serving.desk.inbox.judge(item, judgement, actor=actor_of(request), after=after)
    serving.desk.index.judged(record)
    return LabelledAnswer(id=item, **describe_label(record))


def _item_answer(item: Item) -> ItemAnswer:
    return ItemAnswer(**describe_item(item))
