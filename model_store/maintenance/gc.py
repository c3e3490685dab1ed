"""Delete shards that nothing names.

One run marks them. A later run, after a grace period by the store's own clock, looks again and
sweeps those that still nothing names. Shards that a version names or a run has announced are never
touched. A store with a manifest that is lost or cannot be read is left alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from model_store.backends.base import Entry
from model_store.errors import WriteFailed
from model_store.layout import CLOCK, JOBS, TMP, is_heartbeat, version_name
from model_store.records.gc_marks import (
    Condemned,
    Mark,
    clear,
    clock_s,
    condemn,
    is_void,
    keep,
    list_condemned,
    read_decision,
    sweep,
)
from model_store.records.manifest import Manifest, ShardRef, total_bytes
from model_store.records.tombstone import deleted_versions, forgotten_shards, read_forgotten
from model_store.store.alternates import borrower_records, experts_among
from model_store.store.publish import Standing, standing
from model_store.store.reserve import is_full
from model_store.store.store import Store, list_shards, read_all_manifests, unless_deleted

GRACE_S = 24 * 3600.0
_LEFTOVER_S = 24 * 3600.0
"""The age at which things of dead processes are deleted: in `tmp/` and `clock/`, and beats."""


@dataclass(slots=True, kw_only=True)
class _GcPlan:
    """The actions of one run. Shards are given as their listing has them."""

    reachable: list[Entry] = field(default_factory=list)
    lent: list[Entry] = field(default_factory=list)
    condemn: dict[str, Entry] = field(default_factory=dict)
    waiting: list[Entry] = field(default_factory=list)
    sweep: list[tuple[Mark, Entry]] = field(default_factory=list)
    release: list[Mark] = field(default_factory=list)
    void: list[Mark] = field(default_factory=list)
    forgotten: list[Entry] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """The shards that were condemned, that wait for their grace period, and that are gone (or, of a
    dry run, would be). `unmarked`: condemned shards without room for their marks. `lent`: those of
    the reachable experts that only borrowers may need."""

    dry_run: bool
    reachable: tuple[Entry, ...]
    lent: tuple[Entry, ...]
    condemned: tuple[Entry, ...]
    unmarked: tuple[Entry, ...]
    waiting: tuple[Entry, ...]
    swept: tuple[Entry, ...]
    forgotten: tuple[Entry, ...]
    leftovers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    now_s: float
    grace_s: float
    named: set[str]
    shards: Mapping[str, Entry]


def collect_garbage(
    store: Store,
    *,
    dry_run: bool,
    grace_s: float = GRACE_S,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> GcReport:
    """Mark and sweep shards that nothing names; a dry run only tells."""
    with store.using_reserve() as reserved:
        plan = _plan_collection(reserved, grace_s=grace_s)
        swept = [entry for _, entry in plan.sweep]
        condemned = list(plan.condemn.values())
        if not dry_run:
            swept = _apply(reserved, plan, monotonic_s=monotonic_s)
            condemned = _condemn(reserved, plan)
    return GcReport(
        dry_run=dry_run,
        reachable=tuple(plan.reachable),
        lent=tuple(plan.lent),
        condemned=tuple(condemned),
        unmarked=tuple(entry for entry in plan.condemn.values() if entry not in condemned),
        waiting=tuple(plan.waiting),
        swept=tuple(swept),
        forgotten=tuple(plan.forgotten),
        leftovers=tuple(plan.leftovers),
    )


def _plan_collection(store: Store, *, grace_s: float) -> _GcPlan:
    """Plan a run. Only the clock's own object is written."""
    now_s = clock_s(store.objects)
    # This order, and no other. A publisher announces, then looks for marks: a mark that it did
    # not see is younger than its announcement, so a listing that holds the mark is followed by
    # one that holds the announcement, or else, since that ends after the manifest, the version.
    condemned = list_condemned(store.objects)
    runs = standing(store.objects, now_s=now_s)
    manifests = read_all_manifests(store)
    named = {ref.sha256 for manifest in manifests for ref in manifest.shards}
    for run in runs:
        named.update(run.record.shards if run.record else ())
    shards = list_shards(store)
    lent: set[str] = set()
    # After the marks, as above: a borrower announces itself, then looks for marks.
    if borrower_records(store.objects):
        lent.update(experts_among(store.objects, shards.keys() - named))
    named |= lent
    plan = _GcPlan(
        reachable=[entry for sha256, entry in shards.items() if sha256 in named],
        lent=[shards[sha256] for sha256 in sorted(lent)],
    )
    listing = _Found(now_s=now_s, grace_s=grace_s, named=named, shards=shards)
    _judge_marks(store, plan, condemned, listing)
    plan.forgotten = _still_there(store, manifests, shards=shards)
    plan.leftovers = [*condemned.orphans, *_ended(runs, manifests), *_old(store, now_s=now_s)]
    plan.leftovers += _void(store)
    return plan


def _judge_marks(store: Store, plan: _GcPlan, condemned: Condemned, listing: _Found) -> None:
    """Sort every shard that nothing names into condemned, waiting or swept. The largest come first:
    on a full disk there may not be room for all marks."""
    marked: set[str] = set()
    for mark in condemned.marks:
        entry = listing.shards.get(mark.sha256)
        decision = None if mark.judged_s is None else read_decision(store.objects, mark)
        if decision == "sweep":
            if is_void(mark, now_s=listing.now_s):
                plan.void.append(mark)
            else:
                marked.add(mark.sha256)  # another run is at it
        elif decision == "keep" or entry is None or mark.sha256 in listing.named:
            plan.release.append(mark)
        elif listing.now_s - mark.since_s < listing.grace_s:
            plan.waiting.append(entry)
            marked.add(mark.sha256)
        elif mark.sha256 not in marked:
            plan.sweep.append((mark, entry))
            marked.add(mark.sha256)
    plan.condemn = {
        sha256: entry
        for sha256, entry in sorted(listing.shards.items(), key=lambda item: -item[1].bytes)
        if sha256 not in listing.named and sha256 not in marked
    }


def _still_there(
    store: Store, manifests: list[Manifest], *, shards: Mapping[str, Entry]
) -> list[Entry]:
    """List forgotten images that are there: a `forget` did not come to its end."""
    needed = {ref.sha256 for manifest in manifests for ref in manifest.model_shards}
    present = (forgotten_shards(store.objects) - needed) & shards.keys()
    return [shards[sha256] for sha256 in sorted(present) if read_forgotten(store.objects, sha256)]


def _void(store: Store) -> list[str]:
    """List manifests under the numbers of deleted versions: their writers died."""
    both = set(store.versions()) & set(deleted_versions(store.objects))
    return [
        version_name(number)
        for number in sorted(both)
        if unless_deleted(store, number, deleted=both) is None
    ]


def _ended(runs: list[Standing], manifests: list[Manifest]) -> list[str]:
    published = {manifest.transaction for manifest in manifests}
    return [run.name for run in runs if run.record is None or run.transaction in published]


def _old(store: Store, *, now_s: float) -> list[str]:
    """List what dead processes have left: unfinished writes, and beats of workers."""
    entries = [entry for folder in (TMP, CLOCK) for entry in store.objects.list(folder)]
    entries += [entry for entry in store.objects.list(JOBS) if is_heartbeat(entry.name)]
    return [entry.name for entry in entries if now_s - entry.modified_s > _LEFTOVER_S]


def _apply(store: Store, plan: _GcPlan, *, monotonic_s: Callable[[], float]) -> list[Entry]:
    """Delete the planned objects and return the shards that are gone. On a full disk each deletion
    makes room: objects that need no record go first, then the largest shards."""
    objects = store.objects
    for entry in plan.forgotten:
        objects.delete(entry.name)
    for name in plan.leftovers:
        objects.delete(name)
    for mark in plan.void:
        clear(objects, mark)
    swept = [
        entry
        for mark, entry in sorted(plan.sweep, key=lambda item: -item[1].bytes)
        if sweep(objects, mark, delete=partial(objects.delete, entry.name), monotonic_s=monotonic_s)
    ]
    for mark in plan.release:
        if keep(objects, mark):
            clear(objects, mark)
    return swept


def _condemn(store: Store, plan: _GcPlan) -> list[Entry]:
    """Mark the shards that nothing names, as many as there is room for."""
    marked: list[Entry] = []
    for sha256, entry in plan.condemn.items():
        try:
            condemn(store.objects, sha256)
        except WriteFailed as error:
            if not marked or not is_full(error):
                raise
            break
        marked.append(entry)
    return marked


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBytes:
    """Bytes of a version. `own`: only this version names them, so its deletion frees them. `delta`:
    its parent does not have them. `images`: memory and held-out."""

    version: int
    total: int
    images: int
    delta: int
    shared: int
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """The bytes of all shards that are there (`stored`), and the part that no version names.
    `borrowed`: bytes of experts that only alternates have."""

    versions: tuple[VersionBytes, ...]
    stored: int
    unnamed: int
    borrowed: int
    condemned: int
    forgotten: int
    deleted: tuple[int, ...]


def report_storage(store: Store) -> StorageReport:
    """Count the bytes of all versions."""
    manifests = read_all_manifests(store)
    there = {sha256: entry.bytes for sha256, entry in list_shards(store).items()}
    uses = Counter(
        sha256 for manifest in manifests for sha256 in {ref.sha256 for ref in manifest.shards}
    )
    living = {manifest.version: manifest for manifest in manifests}  # mostly the parents
    condemned = {mark.sha256 for mark in list_condemned(store.objects).marks}
    return StorageReport(
        versions=tuple(
            _bytes_of(
                manifest,
                parent=living.get(manifest.parent or 0) or store.parent_of(manifest),
                uses=uses,
                there=there,
            )
            for manifest in manifests
        ),
        stored=sum(there.values()),
        unnamed=sum(size for sha256, size in there.items() if sha256 not in uses),
        borrowed=total_bytes(
            tuple(
                {
                    ref
                    for manifest in manifests
                    for ref in manifest.experts
                    if ref.sha256 not in there
                }
            )
        ),
        condemned=sum(there.get(sha256, 0) for sha256 in condemned - uses.keys()),
        forgotten=len(store.forgotten()),
        deleted=tuple(n for n in deleted_versions(store.objects) if n not in living),
    )


def _bytes_of(
    manifest: Manifest, *, parent: Manifest | None, uses: Counter[str], there: dict[str, int]
) -> VersionBytes:
    held = _there(manifest.shards, there)
    inherited = {ref.sha256 for ref in parent.shards} if parent else set()
    own = total_bytes(tuple(ref for ref in held if uses[ref.sha256] == 1))
    return VersionBytes(
        version=manifest.version,
        total=total_bytes(held),
        images=total_bytes(_there(manifest.image_shards, there)),
        delta=total_bytes(tuple(ref for ref in held if ref.sha256 not in inherited)),
        shared=total_bytes(held) - own,
        own=own,
    )


def _there(refs: tuple[ShardRef, ...], there: dict[str, int]) -> tuple[ShardRef, ...]:
    """Leave out the images that were forgotten."""
    return tuple(ref for ref in refs if ref.sha256 in there)
