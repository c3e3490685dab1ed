"""Walk from a version to its oldest ancestor, with the size, cost and accuracy of each."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from dne_serve.errors import tell
from dne_serve.reports.measures import measured, of_counts, right_of
from dne_serve.reports.schemas import Grown, ReportLatency, ReportTask
from model_store.errors import StoreError
from model_store.layout import version_name
from model_store.network.flops import folded_flops
from model_store.records.describe import change
from model_store.records.manifest import Manifest, delta_of, total_bytes
from model_store.records.tombstone import read_deleted
from model_store.store.keep import Keep, Key
from model_store.store.store import Store

MOST_VERSIONS = 300
MOST_CELLS = 2_000
"""Accuracies of tasks over versions: a plot of more cannot be read."""
MAX_KEPT_BYTES = 8 << 20


class Ancestor(BaseModel):
    """One version as it is kept: `tasks` has right answers and images of each task, by its place.
    `latency_ms` was measured for this version."""

    grown: Grown
    parent: int | None
    tasks: list[tuple[int, int] | None]
    latency_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Ancestors and the version itself, oldest first. `notes` say where the walk had to end."""

    ancestors: list[Ancestor]
    notes: list[str]

    @property
    def latency(self) -> ReportLatency | None:
        """Find the newest measurement: a version without one costs as much as its parent."""
        for one in reversed(self.ancestors):
            if one.latency_ms is not None:
                return ReportLatency(milliseconds=one.latency_ms, version=one.grown.version)
        return None

    def tasks_of(self, manifest: Manifest) -> list[ReportTask]:
        """Measure each task in every version since it was learnt."""
        told = len(manifest.tasks) * len(self.ancestors) <= MOST_CELLS
        found = []
        for place, task in enumerate(manifest.tasks):
            over = [_at(one.tasks, place) for one in self.ancestors]
            known = [counts for counts in over if counts is not None]
            shares = [None if counts is None else counts[0] / counts[1] for counts in over]
            found.append(
                ReportTask(
                    name=task.name,
                    classes=len(manifest.without_retired(task.classes)),
                    learnt=of_counts(*known[0]) if known else None,
                    now=of_counts(*over[-1]) if over[-1] else None,
                    accuracy=shares if told else None,
                )
            )
        return found


class Lineages:
    """Reads lineages, and no manifest twice: a version never changes."""

    def __init__(self) -> None:
        self._kept = Keep(max_bytes=MAX_KEPT_BYTES)

    def of(self, store: Store, manifest: Manifest) -> Lineage:
        living, notes = frozenset(store.versions()), list[str]()
        found = [self._kept_or_made(store, manifest)]
        number = found[0].parent
        while number is not None:
            if len(found) == MOST_VERSIONS:
                notes.append(f"Growth is shown for the newest {MOST_VERSIONS} versions.")
                break
            if number not in living:
                tombstone = read_deleted(store.objects, number)
                number = tombstone.parent if tombstone else None
                continue
            try:
                found.append(self._read(store, number))
            except StoreError as error:
                notes.append(f"Growth begins after version {number}: {tell(error)}.")
                break
            number = found[-1].parent
        return Lineage(ancestors=found[::-1], notes=notes)

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
            accuracy=measured(metrics.accuracy.all, metrics.images),
        ),
        parent=manifest.parent,
        tasks=[
            right_of(manifest, manifest.without_retired(task.classes)) for task in manifest.tasks
        ],
        latency_ms=metrics.run.latency_ms if metrics.run else None,
    )


def _at(counts: list[tuple[int, int] | None], place: int) -> tuple[int, int] | None:
    return counts[place] if place < len(counts) else None


def _key(store: Store, number: int) -> Key:
    return Key(store.id, version_name(number), 0, 0.0)
