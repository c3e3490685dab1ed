"""Remove the images of a class, memory and held-out, and their statistics from every version, and
the pictures of the class from the inbox. Advice on versions that know the class goes too, for it
may name files; so do jobs whose log names the class, and what training runs on this store have
kept on this machine. The class is followed through its renames. See ADR 89.

A tombstone names each shard that is gone, so that `verify` knows it was meant. The weights keep
what the network has learnt from the images.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from model_store.backends.base import Objects
from model_store.errors import DataRejected, RecordInvalid, StoreUnsupported, VersionNeeded
from model_store.layout import (
    FORGOTTEN,
    JOBS,
    advice_name,
    deleted_name,
    forgotten_name,
    shard_name,
    version_name,
)
from model_store.loop.corrections import forget_corrections
from model_store.loop.inbox import Inbox
from model_store.loop.item_names import REMOVED
from model_store.loop.items import forget_items, items_of_class, open_index
from model_store.names import is_same
from model_store.records.gc_marks import clock_s
from model_store.records.jobs import EndRecord, TurnRecord
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.sealing import (
    create_record,
    find_record,
    make_record,
)
from model_store.records.tombstone import (
    DeletedVersion,
    ForgottenShard,
    deleted_versions,
    read_deleted,
)
from model_store.report.advice import drop_advice_on
from model_store.store.cache import drop_runs, heed_removals
from model_store.store.publish import standing
from model_store.store.store import Store, list_shards, read_all_manifests


def delete_version(store: Store, version: int, *, actor: str, reason: str) -> DeletedVersion:
    """Delete a version. Raise VersionNeeded where a channel names it or a run builds on it."""
    with store.using_reserve() as reserved:
        return _delete(reserved, version, actor=actor, reason=reason)


def check_deletable(store: Store, version: int) -> Manifest:
    """Read a version that could be deleted now. Raise VersionNeeded as `delete_version` does."""
    manifest = store.manifest(version)
    _check_unneeded(store, version)
    return manifest


def _delete(store: Store, version: int, *, actor: str, reason: str) -> DeletedVersion:
    manifest = check_deletable(store, version)
    tombstone = make_record(
        DeletedVersion,
        version=version,
        manifest_digest=manifest.digest,
        parent=manifest.parent,
        parent_digest=manifest.parent_digest,
        actor=actor,
        reason=reason,
    )
    name = deleted_name(version)
    if not create_record(store.objects, name, tombstone):
        # Another one began the deletion and did not end it. Go on with its tombstone.
        tombstone = read_deleted(store.objects, version) or tombstone
    try:
        # Once more, after the tombstone: a move looks for a tombstone after it wrote its record,
        # so one of the two sees the other.
        _check_unneeded(store, version)
    except VersionNeeded:
        store.objects.delete(name)
        raise
    store.objects.delete(version_name(version))
    store.objects.delete(advice_name(version))
    # Another deletion may have given up just now, and deleted the tombstone.
    create_record(store.objects, name, tombstone)
    return tombstone


def _check_unneeded(store: Store, version: int) -> None:
    for channel in store.channels():
        head = store.head(channel)
        if head is not None and head.target == version:
            raise VersionNeeded(
                f"version {version} is what channel {channel} names; "
                "move the channel first, then delete it"
            )
    for run in standing(store.objects, now_s=clock_s(store.objects)):
        if run.record is not None and run.record.parent == version:
            raise VersionNeeded(
                f"version {version} is what training run {run.transaction} builds on; "
                "wait until it has ended"
            )


END = "/end.json"
_TURNS = f"{JOBS}/turns/"


def _drop_jobs_about(objects: Objects, names: Collection[str]) -> int:
    """Delete the jobs that have ended and whose log or reason names a class, and return their
    number. A job under way leaves no log if it finds that its pictures are gone."""
    named = re.compile(
        "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names), re.IGNORECASE
    )
    every = objects.list_names(JOBS)
    ends = [name for name in every if name.endswith(END)]
    gone = [end for end in ends if any(map(named.search, _said(objects, end)))]
    folders = tuple(end.removesuffix("end.json") for end in gone)
    jobs = {folder.split("/")[-2] for folder in folders}
    for name in every:
        if name.startswith(folders) or _is_turn_of(objects, name, jobs):
            objects.delete(name)
    return len(gone)


def _is_turn_of(objects: Objects, name: str, jobs: Collection[str]) -> bool:
    """Return whether a name belongs to the turn of a job: a turn without a job stops the next."""
    if not jobs or not name.startswith(_TURNS):
        return False
    with suppress(RecordInvalid, StoreUnsupported):
        turn = find_record(objects, name, TurnRecord)
        return turn is not None and turn.job in jobs
    return False


def _said(objects: Objects, end_name: str) -> Iterable[str]:
    try:
        end = find_record(objects, end_name, EndRecord)
    except (RecordInvalid, StoreUnsupported):
        return ()
    if end is None:
        return ()
    return (*end.log, end.reason, *(made.refused or "" for made in end.versions))


Origin = tuple[int, int]
"""The version that began with a class, and the place of the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassNames:
    """The names of one class: in each version, and all of them."""

    by_version: Mapping[int, tuple[str, ...]]
    every: tuple[str, ...]

    def has(self, name: str) -> bool:
        return any(is_same(name, label) for label in self.every)

    def in_version(self, version: int, name: str) -> bool:
        """Return whether a version calls the class so."""
        return any(is_same(name, known) for known in self.by_version.get(version, ()))


def _names_of_class(
    manifests: Iterable[Manifest], name: str, *, deleted: Mapping[int, DeletedVersion]
) -> _ClassNames:
    """Find all names of the classes that any version calls `name`."""
    classes = {manifest.version: manifest.spec.classes for manifest in manifests}
    parents = {manifest.version: manifest.parent for manifest in manifests}
    parents |= {number: tombstone.parent for number, tombstone in deleted.items()}
    origins = {
        (version, place): _origin(version, place, classes=classes, parents=parents)
        for version, names in classes.items()
        for place in range(len(names))
    }
    meant = {
        origins[version, place]
        for version, names in classes.items()
        for place, label in enumerate(names)
        if is_same(label, name)
    }
    by_version = {
        version: tuple(
            label for place, label in enumerate(names) if origins[version, place] in meant
        )
        for version, names in classes.items()
    }
    every = {label for names in by_version.values() for label in names}
    return _ClassNames(by_version=by_version, every=(name, *sorted(every - {name})))


def _origin(
    version: int,
    place: int,
    *,
    classes: Mapping[int, tuple[str, ...]],
    parents: Mapping[int, int | None],
) -> Origin:
    """Go back to the first version that has the place. Deleted versions are skipped."""
    first, below, above = version, version, parents.get(version)
    while above is not None and above < below:  # a forged chain does not go round
        known = classes.get(above)
        if known is not None and place >= len(known):
            break
        first = above if known is not None else first
        below, above = above, parents.get(above)
    return first, place


CANNOT_BE_UNDONE = (
    "what the network has learnt from the pictures: it is in the weights of the versions above; "
    "delete those versions, or train again without the class",
    "copies elsewhere: other stores, backups, and the folder that the class was learnt from",
    "pictures and statistics that only deleted versions or unfinished runs named: `dne-store gc "
    "--sweep` takes those away",
    "the name of the class: in the records of the versions above, of channels and of this removal, "
    "and in logs, audit logs and reports that were written elsewhere",
    "caches of other users and machines, and folders of --checkpoint: the next training run on "
    "this store deletes what its own cache has, and tokens expire after 30 days",
    "pictures in the memory of servers: feedback can have one kept for an hour after its answer; "
    "restart them to be sure",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """The shards that are gone, and the versions that named them. `other_classes` had the very same
    images. `inbox_items`: pictures of the inbox with that label, or that answer and no label.
    `also_called`: names that the class has in other versions. `jobs`: jobs whose log named it.
    `cache_files`: files of runs on this machine. `runs`: training runs under way. `not_deleted`:
    files that could not be deleted."""

    class_name: str
    versions: tuple[int, ...]
    shards: tuple[str, ...]
    bytes: int
    other_classes: tuple[str, ...]
    inbox_items: int
    also_called: tuple[str, ...] = ()
    jobs: int = 0
    cache_files: int = 0
    runs: int = 0
    not_deleted: tuple[str, ...] = ()


def forget_class(store: Store, class_name: str, *, actor: str, reason: str) -> ForgetReport:
    """Forget a class. Raise DataRejected where neither a version nor the inbox knows it."""
    with store.using_reserve() as reserved:
        return _forget_all(reserved, class_name, actor=actor, reason=reason)


def look_up(store: Store, class_name: str) -> ForgetReport:
    """Report what forgetting a class would remove now, and remove nothing."""
    manifests = read_all_manifests(store)
    names = _names(store, manifests, class_name)
    inbox = Inbox(store.objects)
    items = len(items_of_class(inbox, open_index(inbox), names.every))
    if not items:
        _check_known(names)
    there = list_shards(store)
    gone = {sha256: size for sha256, size in _new(manifests, names).items() if sha256 in there}
    return _report(store, manifests, names, gone, items=items)


def _forget_all(store: Store, class_name: str, *, actor: str, reason: str) -> ForgetReport:
    gone: dict[str, int] = {}
    names = _names(store, read_all_manifests(store), class_name)
    inbox = Inbox(store.objects)
    items = forget_items(inbox, open_index(inbox), names.every)
    if not items:
        _check_known(names)
    # Read after the items are gone: a run looks for its items after it has published, so one of
    # the two sees the other.
    manifests = read_all_manifests(store)
    while True:
        names = _names(store, manifests, class_name)
        shards = _new(manifests, names)
        new = {sha256: size for sha256, size in shards.items() if sha256 not in gone}
        if not new:
            break
        there = list_shards(store)
        for sha256, size in new.items():
            _forget(store, sha256, class_name=class_name, actor=actor, reason=reason)
            gone[sha256] = size if sha256 in there else 0
        manifests = read_all_manifests(store)  # a version that came meanwhile may name more
    for name in names.every:
        drop_advice_on(store, manifests, name)
    forget_corrections(store, names.every)
    report = _report(store, manifests, names, gone, items=items)
    cache_files, not_deleted = drop_runs(store.location)
    return replace(
        report,
        jobs=_drop_jobs_about(store.objects, names.every),
        cache_files=cache_files,
        not_deleted=not_deleted,
    )


def drop_removed(store: Store) -> int:
    """Drop what runs have kept on this machine of images that were removed since the last look.
    Return the number of files that are gone."""
    names = (*store.objects.list_names(FORGOTTEN), *store.objects.list_names(REMOVED))
    return heed_removals(store.location, names)


def forget_version(store: Store, manifest: Manifest, *, actor: str, reason: str) -> None:
    """Delete a version that learnt from pictures which were deleted meanwhile, with the images and
    statistics that no other version names. No channel names the version yet."""
    others = [other for other in read_all_manifests(store) if other.version != manifest.version]
    named = {ref.sha256 for other in others for ref in other.shards}
    for entry in manifest.kept_of_classes:
        if entry.shard.sha256 not in named:
            _forget(
                store,
                entry.shard.sha256,
                class_name=entry.class_name,
                actor=actor,
                reason=reason,
            )
    delete_version(store, manifest.version, actor=actor, reason=reason)


def _names(store: Store, manifests: list[Manifest], class_name: str) -> _ClassNames:
    tombstones = {
        number: tombstone
        for number in deleted_versions(store.objects)
        if (tombstone := read_deleted(store.objects, number)) is not None
    }
    return _names_of_class(manifests, class_name, deleted=tombstones)


def _new(manifests: list[Manifest], names: _ClassNames) -> dict[str, int]:
    """Find the shards of images of a class. Weights stay, whatever a manifest calls them."""
    weights = {ref.sha256 for manifest in manifests for ref in manifest.model_shards}
    refs = _kept_of(manifests, names)
    return {ref.sha256: ref.bytes for ref in refs if ref.sha256 not in weights}


def _report(
    store: Store,
    manifests: list[Manifest],
    names: _ClassNames,
    gone: Mapping[str, int],
    *,
    items: int,
) -> ForgetReport:
    class_name, *others = names.every
    return ForgetReport(
        class_name=class_name,
        versions=tuple(manifest.version for manifest in manifests if _kept_of([manifest], names)),
        shards=tuple(gone),
        bytes=sum(gone.values()),
        other_classes=_others(manifests, gone.keys(), names),
        inbox_items=items,
        also_called=tuple(other for other in others if not is_same(other, class_name)),
        runs=len(standing(store.objects, now_s=clock_s(store.objects))),
    )


def _forget(store: Store, sha256: str, *, class_name: str, actor: str, reason: str) -> None:
    tombstone = make_record(
        ForgottenShard, sha256=sha256, class_name=class_name, actor=actor, reason=reason
    )
    # The tombstone first: a publish looks for tombstones after it wrote its shards.
    create_record(store.objects, forgotten_name(sha256), tombstone)
    store.objects.delete(shard_name(sha256))


def _check_known(names: _ClassNames) -> None:
    if not any(names.by_version.values()):
        raise DataRejected(f"no version knows a class {names.every[0]!r}")


def _kept_of(manifests: list[Manifest], names: _ClassNames) -> list[ShardRef]:
    return [
        entry.shard
        for manifest in manifests
        for entry in manifest.kept_of_classes
        if names.in_version(manifest.version, entry.class_name)
    ]


def _others(
    manifests: list[Manifest], gone: Collection[str], names: _ClassNames
) -> tuple[str, ...]:
    """List the other classes that had the same images, and lose them too."""
    classes = {
        entry.class_name
        for manifest in manifests
        for entry in manifest.kept_of_classes
        if entry.shard.sha256 in gone
    }
    return tuple(sorted(name for name in classes if not names.has(name)))
