"""Keep the advice on a version beside its manifest, until the version or a class of it goes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from model_store.advice.record import Advice, AdviceRecord
from model_store.errors import VersionNotFound
from model_store.layout import FORGOTTEN, advice_name, forgotten_of
from model_store.names import is_same
from model_store.records.manifest import Manifest
from model_store.records.sealing import create_record, find_record, timestamp
from model_store.store.store import Store


def write_advice(store: Store, manifest: Manifest, advice: Advice) -> None:
    """Write the advice on a version that is published. The first one that is written stays."""
    record = AdviceRecord(
        version=manifest.version,
        manifest_digest=manifest.digest,
        advice=advice,
        time=timestamp(),
        transaction=uuid.uuid4().hex,
    )
    create_record(store.objects, advice_name(manifest.version), record)
    # Looked at afterwards: a deletion takes advice away that it finds, so one sees the other.
    if not _stands(store, manifest):
        store.objects.delete(advice_name(manifest.version))


def read_advice(store: Store, manifest: Manifest) -> Advice | None:
    """Read the advice on a version. Return None where there is none, or that of another version
    which had the number before."""
    record = find_record(store.objects, advice_name(manifest.version), AdviceRecord)
    if record is None or record.manifest_digest != manifest.digest:
        return None
    return record.advice


def drop_advice_on(store: Store, manifests: Iterable[Manifest], class_name: str) -> None:
    """Delete the advice on all versions that know a class: it may name files of the class."""
    for manifest in manifests:
        if any(is_same(name, class_name) for name in manifest.spec.classes):
            store.objects.delete(advice_name(manifest.version))


def _stands(store: Store, manifest: Manifest) -> bool:
    """Tell whether the version is there, and nothing that it names has been forgotten."""
    try:
        store.manifest(manifest.version)
    except VersionNotFound:
        return False
    gone = {forgotten_of(entry.name) for entry in store.objects.list(FORGOTTEN)}
    return not any(ref.sha256 in gone for ref in manifest.shards)
