"""Items of an inbox for tests, with pictures that are a few bytes."""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from model_store.loop.inbox import Inbox
from model_store.loop.item_names import new_id
from model_store.records.inbox import ItemRecord, KeptPicture, TopClass

NOON = datetime(2026, 11, 17, 12, 0, 0, tzinfo=UTC)


def picture_bytes(content: str) -> bytes:
    return f"picture of {content}".encode()


def item_record(
    content: str,
    *,
    minutes: float = 0.0,
    label: str = "cat",
    score: float = 0.5,
    dhash: int = 0,
    since: datetime = NOON,
    **fields: Any,
) -> ItemRecord:
    """Make the record of an item that was answered `minutes` after `since`."""
    data = picture_bytes(content)
    picture = KeptPicture(
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        type="image/png",
        width=8,
        height=8,
        dhash=f"{dhash:016x}",
    )
    given: dict[str, Any] = {
        "id": new_id(since + timedelta(minutes=minutes)),
        "time": "2026-11-17T12:00:00.000000Z",
        "picture": picture,
        "channel": "production",
        "version": 1,
        "top": (TopClass(label=label, score=score), TopClass(label="dog", score=1 - score)),
        "margin": abs(2 * score - 1),
        "unknown": False,
        "unknown_score": None,
        "rules": ("score<0.6",),
        "transaction": uuid.uuid4().hex,
    }
    return ItemRecord(**{**given, **fields})


def add_item(inbox: Inbox, content: str, **fields: Any) -> str:
    """Add an item and return its id."""
    record = item_record(content, **fields)
    inbox.add(record, picture_bytes(content))
    return record.id
