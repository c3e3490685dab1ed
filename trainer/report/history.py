"""List the ancestors of a version, with the change and the cost of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_store.records.describe import change
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.store.store import Store


def lineage_of(store: Store, manifest: Manifest) -> list[Manifest]:
    """List the version and its ancestors, oldest first, without deleted ones."""
    lineage = [manifest]
    while (parent := store.parent_of(lineage[0])) is not None:
        lineage.insert(0, parent)
    return lineage


def growth(store: Store, lineage: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Count and size each version. `accuracy` was measured when the version was made."""
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
