"""An inbox with labelled pictures of the classes that tests learn."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from model_store.loop.inbox import Inbox, Judgement
from model_store.records.inbox import ItemRecord
from model_store.store.store import Store
from tests.model_store.loop.items import item_record
from tests.trainer.folders import pixels_of


def inbox_of(store: Path) -> Inbox:
    return Inbox(Store.open(str(store)).objects)


def label_pictures(
    store: Path, counts: Mapping[str, int], *, seed: int = 7, looks_like: str | None = None
) -> list[str]:
    """Add pictures of these classes and label them. Return the ids of the items."""
    inbox = inbox_of(store)
    ids: list[str] = []
    for place, (name, count) in enumerate(counts.items()):
        # No picture is in two classes, also where all look alike.
        drawn = pixels_of(looks_like or name, count, seed=seed + (place if looks_like else 0))
        for number, pixels in enumerate(drawn):
            written = io.BytesIO()
            Image.fromarray(pixels).save(written, "PNG")
            record = _record(f"{name} {number}", written.getvalue(), minutes=len(ids) / 60)
            inbox.add(record, written.getvalue())
            inbox.judge(record.id, Judgement.of_class(name), actor="tests")
            ids.append(record.id)
    return ids


def _record(content: str, picture: bytes, *, minutes: float) -> ItemRecord:
    made = item_record(content, minutes=minutes)
    found = {"sha256": hashlib.sha256(picture).hexdigest(), "bytes": len(picture)}
    return made.model_copy(update={"picture": made.picture.model_copy(update=found)})
