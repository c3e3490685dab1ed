"""Describe jobs as plain data, for HTTP: how far they have come, and the verdict at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from model_store.errors import StoreError
from model_store.jobs.jobs import Job
from model_store.jobs.waiting import Waiting
from model_store.records.describe import verdict
from model_store.records.jobs import MadeVersion
from model_store.records.manifest import delta_of, total_bytes
from model_store.store.store import Store
from model_store.tables import likely_range


def describe_job(job: Job, store: Store, *, is_dead: bool = False) -> dict[str, Any]:
    record, end, beat = job.record, job.end, job.beat
    versions = [describe_version(one, store) for one in (end.versions if end else ())]
    return {
        "id": record.id,
        "channel": record.channel,
        "reason": record.reason,
        "actor": record.actor,
        "time": record.time,
        "state": state_of(job, is_dead=is_dead),
        "worker": job.claim.worker if job.claim else None,
        "software": job.claim.software if job.claim else None,
        "claims": job.standing.claim,
        "phase": beat.phase if beat else None,
        "share": beat.share if beat else None,
        "seconds_left": beat.seconds_left if beat else None,
        "log": list(end.log if end else beat.log if beat else ()),
        "ended": end.time if end else None,
        "said": end.reason if end else "",
        "before": versions[0]["parent"] if versions else None,
        "versions": versions,
    }


def state_of(job: Job, *, is_dead: bool = False) -> str:
    if job.end is not None:
        return job.end.outcome
    if job.standing.is_cancelled:
        return "cancelling"
    if not job.standing.claim:
        return "waiting"
    return "lost" if is_dead else "running"


def describe_version(made: MadeVersion, store: Store) -> dict[str, Any]:
    """Describe a version of a job: accuracy before and after, with 95 % ranges."""
    facts = {"version": made.version, "promoted": made.promoted, "refused": made.refused}
    try:
        manifest = store.read_manifest(made.version)
        parent = store.parent_of(manifest)
    except StoreError as error:  # deleted or damaged since; the rest of the job is still told
        return {**facts, **NOT_READ, "verdict": str(error)}
    gate, accuracy = manifest.metrics.gate, manifest.metrics.accuracy
    old, new = (gate.old_images, gate.new_images) if gate else (0, 0)
    return {
        **facts,
        "parent": manifest.parent,
        "new_classes": list(manifest.new_classes),
        "extended": list(manifest.extended),
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
    "reasons": [],
    "old_before": None,
    "old_after": None,
    "new_after": None,
    "delta_bytes": 0,
}


def describe_waiting(waiting: Waiting) -> dict[str, Any]:
    return {
        "known": _counts(waiting.known),
        "new": _counts(waiting.new),
        "left": [{"label": name, "why": why} for name, why in waiting.left.items()],
    }


def _counts(labels: Mapping[str, Sized]) -> list[dict[str, Any]]:
    return [{"label": name, "images": len(some)} for name, some in labels.items()]


def _measured(share: float | None, images: int) -> dict[str, Any] | None:
    """Describe an accuracy with the number of its images and the range that is likely."""
    if share is None or not images:
        return None
    low, high = likely_range(share, images)
    return {"share": share, "images": images, "low": low, "high": high}
