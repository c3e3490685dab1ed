"""Describe versions and channels as plain data, in the shape that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from model_store.records.channel import ChannelRecord
from model_store.records.manifest import Draft, Manifest, ShardRef, delta_of, total_bytes
from model_store.tables import counted, percent

T = TypeVar("T")
Verdict = Literal["passed", "refused", "overruled", "not judged"]
NAMED = 8
"""Classes that a sentence names; further ones are counted."""


def summary(manifest: Manifest, *, parent: Draft | None) -> dict[str, Any]:
    """Describe a version in one row of `dne-store list`: its change, counts, sizes, verdict."""
    gate = manifest.metrics.gate
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "tasks": len(manifest.tasks),
        "classes": len(manifest.classes),
        "accuracy": manifest.metrics.accuracy.model_dump(),
        "delta_bytes": total_bytes(delta_of(manifest, parent)),
        "total_bytes": total_bytes(manifest.model_shards),
        "change": change(manifest, parent),
        "gate": gate_of(manifest),
        "verdict": verdict(manifest),
        "reasons": list(gate.reasons) if gate else [],
    }


def details(manifest: Manifest, *, parent: Draft | None) -> dict[str, Any]:
    """Describe all of a version for `dne-store show`: names and shards besides the sizes."""
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "digest": manifest.digest,
        "transaction": manifest.transaction,
        "software": manifest.software,
        "signed_by": manifest.signature.key if manifest.signature else None,
        "tasks": [
            {
                "name": task.name,
                "classes": list(manifest.without_retired(task.classes)),
                "heads": task.heads,
            }
            for task in manifest.tasks
        ],
        "classes": list(manifest.classes),
        "retired": list(manifest.retired),
        "parents": dict(manifest.hierarchy.parents) if manifest.hierarchy else {},
        "extended": list(manifest.extended),
        "corrected": manifest.corrected,
        "deepened": list(manifest.deepened),
        "adapted": manifest.adapted,
        "shards": _shards(manifest.shards),
        "metrics": manifest.metrics.model_dump(mode="json", by_alias=True),
        "verdict": verdict(manifest),
        "calibration": manifest.calibration.model_dump(),
        "unknown": manifest.unknown and manifest.unknown.model_dump(),
        "delta_bytes": total_bytes(delta_of(manifest, parent)),
        "total_bytes": total_bytes(manifest.model_shards),
        "memory_bytes": total_bytes(manifest.image_shards),
    }


def verdict(manifest: Manifest) -> str:
    """Write the gate's verdict in one line: passed, refused, overruled, or not judged because of
    too few images."""
    gate = manifest.metrics.gate
    if gate is None:
        return "not judged"
    if not gate.passed:
        return f"{'overruled' if gate.forced else 'refused'}: {'; '.join(gate.reasons)}"
    if not gate.not_judged:
        return "passed"
    images = {"old": gate.old_images, "new": gate.new_images}
    of_which = "" if manifest.parent is None else " of {} classes"
    few = [f"{_images(images[side])}{of_which.format(side)}" for side in gate.not_judged]
    return f"not judged: {' and '.join(few)}"


def _images(count: int) -> str:
    return counted(count, "image") if count else "no images"


def gate_of(manifest: Manifest) -> Verdict:
    """Return the first word of the verdict, for programs."""
    said = verdict(manifest)
    return next(word for word in get_args(Verdict) if said.startswith(word))


def change(manifest: Manifest, parent: Draft | None) -> str:
    """Describe in one line how a version differs from its parent."""
    if manifest.adapted:
        return f"adapted the first expert to {_some(manifest.classes)}"
    if manifest.deepened:
        return f"learnt an expert for {_some(manifest.deepened)}"
    if manifest.corrected:
        images = counted(manifest.corrected, "image")
        return f"corrected {images} of {_some(manifest.extended)}"
    if manifest.extended:
        return f"extended {_some(manifest.extended)} with more images"
    if parent is None and manifest.parent is not None and manifest.metrics.gate is None:
        return f"changed version {manifest.parent}, which cannot be read any more"
    if parent is None or len(manifest.tasks) > len(parent.tasks):
        newest = manifest.tasks[-1]
        return f"learnt {newest.name}: {_some(newest.classes)}"
    said = [f"retired {name}" for name in _only_in(manifest.retired, parent.retired)]
    pairs = list(zip(parent.spec.classes, manifest.spec.classes, strict=False))
    said += [f"renamed {old} to {new}" for old, new in pairs if old != new]
    said += _thresholds_set(manifest, parent)
    return ", ".join(said) or "tuned the classifier again"


def _thresholds_set(manifest: Manifest, parent: Draft) -> list[str]:
    """Say which classes got a threshold of their own or lost it, by a person's word."""
    before, now = (one.unknown.by_class if one.unknown else {} for one in (parent, manifest))
    pairs = zip(parent.spec.classes, manifest.spec.classes, strict=False)
    changed = {
        new: now.get(new)
        for old, new in pairs
        if before.get(old) != now.get(new) and new not in manifest.retired
    }
    own = [f"{name} {percent(one.above)}" for name, one in changed.items() if one]
    fitted = [f"{name} as fitted" for name, one in changed.items() if one is None]
    return [f"set thresholds: {_some([*own, *fitted])}"] if changed else []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def difference(old: Manifest, new: Manifest) -> dict[str, Any]:
    """Describe the difference between two versions, in both directions."""
    added = _only_in(new.shards, old.shards)
    removed = _only_in(old.shards, new.shards)
    return {
        "from": old.version,
        "to": new.version,
        "tasks": _differences(_task_names(old), _task_names(new)),
        "classes": _differences(old.classes, new.classes),
        "shards": {"added": _shards(added), "removed": _shards(removed)},
        "added_bytes": total_bytes(added),
        "removed_bytes": total_bytes(removed),
        "metrics": {
            "accuracy": _changes(
                old.metrics.accuracy.model_dump(), new.metrics.accuracy.model_dump()
            ),
            "per_class": _changes(old.metrics.per_class, new.metrics.per_class),
        },
    }


def channel_head(record: ChannelRecord) -> dict[str, Any]:
    return record.model_dump(include={"target", "mode", "number"})


def channel_move(record: ChannelRecord, *, previous: int | None) -> dict[str, Any]:
    """Describe a record that was just written, and the version that the channel named before."""
    told = {"channel", "number", "target", "mode", "actor", "reason", "time"}
    return {**record.model_dump(include=told), "previous": previous}


def _shards(refs: Iterable[ShardRef]) -> list[dict[str, Any]]:
    return [ref.model_dump() for ref in dict.fromkeys(refs)]


def _task_names(manifest: Manifest) -> list[str]:
    return [task.name for task in manifest.tasks]


def _differences(old: Sequence[str], new: Sequence[str]) -> dict[str, list[str]]:
    return {"added": list(_only_in(new, old)), "removed": list(_only_in(old, new))}


def _only_in(these: Sequence[T], those: Sequence[T]) -> tuple[T, ...]:
    known = set(those)
    return tuple(item for item in these if item not in known)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"from": old.get(name), "to": new.get(name)}
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    }
