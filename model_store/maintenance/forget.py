"""Remove the images of a class, memory and held-out, and their statistics from every version, and
the pictures of the class from the inbox. Advice on versions that know the class goes too, for it
may name files.

A tombstone names each shard that is gone, so that `verify` knows it was meant. The weights keep
what the network has learnt from the images.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from model_store.advice.kept import drop_advice_on
from model_store.errors import DataRejected
from model_store.inbox.inbox import Inbox
from model_store.inbox.reading import open_index
from model_store.inbox.removal import forget_items, items_of_class
from model_store.layout import forgotten_name, shard_name
from model_store.names import is_same, spelt_among
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.sealing import create_record, refusing_bad_fields, timestamp
from model_store.records.tombstone import ForgottenShard
from model_store.store.inventory import list_shards, read_all_manifests
from model_store.store.store import Store

CANNOT_BE_UNDONE = (
    "what the network has learnt from the pictures: it is in the weights of the versions above; "
    "delete those versions, or train again without the class",
    "copies elsewhere: other stores, backups, and the folder that the class was learnt from",
    "pictures and statistics that only deleted versions or unfinished runs named: `dne-store gc "
    "--sweep` takes those away",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """The shards that are gone, and the versions that named them. `other_classes` had the very same
    images. `inbox_items`: pictures of the inbox with that label, or that answer and no label."""

    class_name: str
    versions: tuple[int, ...]
    shards: tuple[str, ...]
    bytes: int
    other_classes: tuple[str, ...]
    inbox_items: int


def forget_class(store: Store, class_name: str, *, actor: str, reason: str) -> ForgetReport:
    """Forget a class. Raise DataRejected where neither a version nor the inbox knows it."""
    with store.using_reserve() as reserved:
        return _forget_all(reserved, class_name, actor=actor, reason=reason)


def look_up(store: Store, class_name: str) -> ForgetReport:
    """Tell what forgetting a class would remove now, and remove nothing."""
    manifests = read_all_manifests(store)
    inbox = Inbox(store.objects)
    items = len(items_of_class(inbox, open_index(inbox), class_name))
    if not items:
        _check_known(manifests, class_name)
    there = list_shards(store)
    gone = {sha256: size for sha256, size in _new(manifests, class_name).items() if sha256 in there}
    return _report(manifests, class_name, gone, items=items)


def _forget_all(store: Store, class_name: str, *, actor: str, reason: str) -> ForgetReport:
    gone: dict[str, int] = {}
    manifests = read_all_manifests(store)
    inbox = Inbox(store.objects)
    items = forget_items(inbox, open_index(inbox), class_name)
    if not items:
        _check_known(manifests, class_name)
    while True:
        found = _new(manifests, class_name)
        new = {sha256: size for sha256, size in found.items() if sha256 not in gone}
        if not new:
            break
        there = list_shards(store)
        for sha256, size in new.items():
            _forget(store, sha256, class_name=class_name, actor=actor, reason=reason)
            gone[sha256] = size if sha256 in there else 0
        manifests = read_all_manifests(store)  # a version that came meanwhile may name more
    drop_advice_on(store, manifests, class_name)
    return _report(manifests, class_name, gone, items=items)


def _new(manifests: list[Manifest], class_name: str) -> dict[str, int]:
    """Find the shards of images of a class. Weights stay, whatever a manifest calls them."""
    weights = {ref.sha256 for manifest in manifests for ref in manifest.model_shards}
    refs = _kept_of(manifests, class_name)
    return {ref.sha256: ref.bytes for ref in refs if ref.sha256 not in weights}


def _report(
    manifests: list[Manifest], class_name: str, gone: Mapping[str, int], *, items: int
) -> ForgetReport:
    return ForgetReport(
        class_name=class_name,
        versions=tuple(one.version for one in manifests if _kept_of([one], class_name)),
        shards=tuple(gone),
        bytes=sum(gone.values()),
        other_classes=_others(manifests, gone.keys(), class_name),
        inbox_items=items,
    )


def _forget(store: Store, sha256: str, *, class_name: str, actor: str, reason: str) -> None:
    with refusing_bad_fields():
        tombstone = ForgottenShard(
            sha256=sha256,
            class_name=class_name,
            actor=actor,
            reason=reason,
            time=timestamp(),
            transaction=uuid.uuid4().hex,
        )
    # The tombstone first: a publish looks for tombstones after it wrote its shards.
    create_record(store.objects, forgotten_name(sha256), tombstone)
    store.objects.delete(shard_name(sha256))


def _check_known(manifests: list[Manifest], class_name: str) -> None:
    if not any(spelt_among(class_name, manifest.spec.classes) for manifest in manifests):
        raise DataRejected(f"no version knows a class {class_name!r}")


def _kept_of(manifests: list[Manifest], class_name: str) -> list[ShardRef]:
    return [
        entry.shard
        for manifest in manifests
        for entry in manifest.kept_of_classes
        if is_same(entry.class_name, class_name)
    ]


def _others(manifests: list[Manifest], gone: Collection[str], class_name: str) -> tuple[str, ...]:
    """List the other classes that had the same images, and lose them too."""
    found = {
        entry.class_name
        for manifest in manifests
        for entry in manifest.kept_of_classes
        if entry.shard.sha256 in gone
    }
    return tuple(sorted(name for name in found if not is_same(name, class_name)))
