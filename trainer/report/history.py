"""How a version came about: its ancestors, what each of them did, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_store.records.describe import change
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.store.store import Store


def lineage_of(store: Store, manifest: Manifest) -> list[Manifest]:
    """The version and its ancestors, oldest first; those that were deleted are passed over."""
    lineage = [manifest]
    while (parent := store.parent_of(lineage[0])) is not None:
        lineage.insert(0, parent)
    return lineage


def growth(store: Store, lineage: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Counts and sizes of each version. `accuracy` is what was measured when it was made."""
    rows = []
    for one in lineage:
        parent = store.parent_of(one)
        rows.append(
            {
                "version": one.version,
                "parent": one.parent,
                "created": one.created,
                "tasks": len(one.tasks),
                "classes": len(one.classes),
                "parameters": one.spec.parameters,
                "delta_bytes": total_bytes(delta_of(one, parent)),
                "total_bytes": total_bytes(one.model_shards),
                "memory_bytes": total_bytes(one.image_shards),
                "accuracy": one.metrics.accuracy.all,
                "change": change(one, parent),
            }
        )
    return rows
