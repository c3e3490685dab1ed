"""Describe items, labels and jobs as plain data, for `dne-store inbox --json` and for HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from model_store.errors import StoreError
from model_store.loop.index import STATE_OF
from model_store.loop.items import Item
from model_store.loop.jobs import Job
from model_store.loop.waiting import WaitingLabels
from model_store.records.describe import verdict
from model_store.records.inbox import CorrectionRecord, LabelRecord
from model_store.records.jobs import MadeVersion
from model_store.records.manifest import delta_of, total_bytes
from model_store.store.store import Store
from model_store.tables import likely_range


def describe_item(item: Item) -> dict[str, Any]:
    record, head = item.record, item.head
    return {
        "id": record.id,
        "time": record.time,
        "version": record.version,
        "channel": record.channel,
        "label": record.answer.label if record.answer else None,
        "score": record.answer.score if record.answer else None,
        "margin": record.margin,
        "top": [top_class.model_dump() for top_class in record.top],
        **record.model_dump(include={"unknown", "unknown_score", "other_version", "other_label"}),
        "rules": list(record.rules),
        **record.picture.model_dump(),
        "state": STATE_OF[head.kind] if head else "unlabelled",
        "number": head.number if head else 0,
        "judgement": describe_label(head) if head else None,
    }


def describe_label(record: LabelRecord) -> dict[str, Any]:
    return record.model_dump(include={"number", "kind", "label", "actor", "time"})


def describe_job(job: Job, store: Store, *, is_dead: bool = False) -> dict[str, Any]:
    """Describe a job: its progress, and the verdict on its versions at the end."""
    record, end, heartbeat = job.record, job.end, job.heartbeat
    versions = [_describe_version(made, store) for made in (end.versions if end else ())]
    return {
        **record.model_dump(include={"id", "kind", "channel", "reason", "actor", "time"}),
        "state": state_of(job, is_dead=is_dead),
        "worker": job.claim.worker if job.claim else None,
        "software": job.claim.software if job.claim else None,
        "claims": job.state.claim,
        "phase": heartbeat.phase if heartbeat else None,
        "share": heartbeat.share if heartbeat else None,
        "seconds_left": heartbeat.seconds_left if heartbeat else None,
        "log": list(end.log if end else heartbeat.log if heartbeat else ()),
        "ended": end.time if end else None,
        "said": end.reason if end else "",
        "before": versions[0]["parent"] if versions else None,
        "versions": versions,
    }


def state_of(job: Job, *, is_dead: bool = False) -> str:
    if job.end is not None:
        return job.end.outcome
    if job.state.is_cancelled:
        return "cancelling"
    if not job.state.claim:
        return "waiting"
    return "lost" if is_dead else "running"


def _describe_version(made: MadeVersion, store: Store) -> dict[str, Any]:
    """Describe a version of a job: accuracy before and after, with 95 % ranges."""
    facts = {"version": made.version, "promoted": made.promoted, "refused": made.refused}
    try:
        manifest = store.read_manifest(made.version)
        parent = store.parent_of(manifest)
    except StoreError as error:  # deleted or damaged since: describe the rest of the job
        return {**facts, **NOT_READ, "verdict": str(error)}
    gate, accuracy = manifest.metrics.gate, manifest.metrics.accuracy
    old, new = (gate.old_images, gate.new_images) if gate else (0, 0)
    return {
        **facts,
        "parent": manifest.parent,
        "new_classes": list(manifest.new_classes),
        "extended": list(manifest.extended),
        "corrected": manifest.corrected,
        "verdict": verdict(manifest),
        "reasons": list(gate.reasons) if gate else [],
        "old_before": _measured(accuracy.parent_old, old),
        "old_after": _measured(accuracy.old, old),
        "new_after": _measured(accuracy.new, new),
        "delta_bytes": total_bytes(delta_of(manifest, parent)),
    }


NOT_READ: dict[str, Any] = {
    "parent": None,
    "new_classes": [],
    "extended": [],
    "corrected": 0,
    "reasons": [],
    "old_before": None,
    "old_after": None,
    "new_after": None,
    "delta_bytes": 0,
}


def describe_waiting(waiting: WaitingLabels) -> dict[str, Any]:
    return {
        "known": _counts(waiting.known),
        "new": _counts(waiting.new),
        "left": [{"label": name, "why": why} for name, why in waiting.left.items()],
        "corrections": [
            {**describe_correction(move.record), "label": move.label, "why": None}
            for move in waiting.corrections.waiting
        ]
        + [{**describe_correction(one), "why": why} for one, why in waiting.corrections.left],
    }


def describe_correction(record: CorrectionRecord) -> dict[str, Any]:
    return record.model_dump(include={"id", "image", "label", "to", "actor", "reason", "time"})


def _counts(labels: Mapping[str, Sized]) -> list[dict[str, Any]]:
    return [{"label": name, "images": len(items)} for name, items in labels.items()]


def _measured(share: float | None, images: int) -> dict[str, Any] | None:
    """Describe an accuracy with its number of images and its 95 % range."""
    if share is None or not images:
        return None
    low, high = likely_range(share, images)
    return {"share": share, "images": images, "low": low, "high": high}
