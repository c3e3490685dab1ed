"""Walk from a version to its oldest ancestor, with the size, cost and accuracy of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from model_store.errors import StoreError
from model_store.layout import version_name
from model_store.network.flops import folded_flops
from model_store.records.describe import change
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.records.tombstone import read_deleted
from model_store.report.record import Counts, Grown, Measured, ReportLatency, count_right
from model_store.store.store import Store
from model_store.store.summaries import Keep, Key

_MOST_VERSIONS = 300
MAX_KEPT_BYTES = 8 << 20


class Ancestor(BaseModel):
    """One version as it is kept. `tasks` has the counts of each task, by its place. `latency_ms`
    was measured for this version."""

    grown: Grown
    parent: int | None
    tasks: list[Counts | None]
    latency_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Ancestors and the version itself, oldest first. `notes` say where the walk had to end."""

    ancestors: list[Ancestor]
    notes: list[str]

    @property
    def latency(self) -> ReportLatency | None:
        """Find the newest measurement: a version without one costs as much as its parent."""
        for ancestor in reversed(self.ancestors):
            if ancestor.latency_ms is not None:
                return ReportLatency(
                    milliseconds=ancestor.latency_ms, version=ancestor.grown.version
                )
        return None


class AncestryCache:
    """Reads ancestries, and no manifest twice: a version never changes.

    `tell` puts the error of an ancestor into a sentence that readers of the report may see.
    """

    def __init__(self, *, tell: Callable[[Exception], str] = str) -> None:
        self._kept = Keep(max_bytes=MAX_KEPT_BYTES)
        self._tell = tell

    def of(self, store: Store, manifest: Manifest) -> Ancestry:
        living, notes = frozenset(store.versions()), list[str]()
        newest_first = [self._kept_or_made(store, manifest)]
        number = newest_first[0].parent
        while number is not None:
            if len(newest_first) == _MOST_VERSIONS:
                notes.append(f"Growth is shown for the newest {_MOST_VERSIONS} versions.")
                break
            if number not in living:
                tombstone = read_deleted(store.objects, number)
                number = tombstone.parent if tombstone else None
                continue
            try:
                newest_first.append(self._read(store, number))
            except StoreError as error:
                notes.append(f"Growth begins after version {number}: {self._tell(error)}.")
                break
            number = newest_first[-1].parent
        return Ancestry(ancestors=newest_first[::-1], notes=notes)

    def _read(self, store: Store, number: int) -> Ancestor:
        kept = self._kept.get(_key(store, number))
        if kept is not None:
            return Ancestor.model_validate_json(kept)
        return self._kept_or_made(store, store.manifest(number))

    def _kept_or_made(self, store: Store, manifest: Manifest) -> Ancestor:
        key = _key(store, manifest.version)
        kept = self._kept.get(key)
        if kept is not None:
            return Ancestor.model_validate_json(kept)
        try:
            parent = store.parent_of(manifest)
        except StoreError:
            return _ancestor(manifest, None)  # not kept: the parent may be mended
        made = _ancestor(manifest, parent)
        self._kept.put(key, made.model_dump_json().encode())
        return made


def _ancestor(manifest: Manifest, parent: Manifest | None) -> Ancestor:
    metrics = manifest.metrics
    return Ancestor(
        grown=Grown(
            version=manifest.version,
            change=change(manifest, parent),
            created=manifest.created,
            tasks=len(manifest.tasks),
            classes=len(manifest.classes),
            parameters=manifest.spec.parameters,
            gflop=folded_flops(manifest.spec) / 1e9,
            delta_bytes=total_bytes(delta_of(manifest, parent)),
            total_bytes=total_bytes(manifest.model_shards),
            memory_bytes=total_bytes(manifest.image_shards),
            accuracy=Measured.of(metrics.accuracy.all, metrics.images),
        ),
        parent=manifest.parent,
        tasks=[
            count_right(metrics.confusion, manifest.without_retired(task.classes))
            for task in manifest.tasks
        ],
        latency_ms=metrics.run.latency_ms if metrics.run else None,
    )


def _key(store: Store, number: int) -> Key:
    return Key(store.id, version_name(number), 0, 0.0)
