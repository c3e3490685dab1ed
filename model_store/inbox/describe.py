"""Describe items and labels as plain data, the same for `dne-store inbox --json` and HTTP."""

from __future__ import annotations

from typing import Any

from model_store.inbox.index import STATE_OF
from model_store.inbox.reading import Item
from model_store.records.inbox import LabelRecord


def describe_item(item: Item) -> dict[str, Any]:
    record, head = item.record, item.head
    return {
        "id": record.id,
        "time": record.time,
        "version": record.version,
        "channel": record.channel,
        "label": record.answer.label,
        "score": record.answer.score,
        "margin": record.margin,
        "top": [one.model_dump() for one in record.top],
        "unknown": record.unknown,
        "unknown_score": record.unknown_score,
        "other_version": record.other_version,
        "other_label": record.other_label,
        "rules": list(record.rules),
        "width": record.picture.width,
        "height": record.picture.height,
        "type": record.picture.type,
        "bytes": record.picture.bytes,
        "sha256": record.picture.sha256,
        "dhash": record.picture.dhash,
        "state": STATE_OF[head.kind] if head else "unlabelled",
        "number": head.number if head else 0,
        "judgement": describe_label(head) if head else None,
    }


def describe_label(record: LabelRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "kind": record.kind,
        "label": record.label,
        "actor": record.actor,
        "time": record.time,
    }
