"""Manifests as the HTTP interface shows them: the words of `dne-store --json`. Loads nothing."""

from __future__ import annotations

from typing import Any

from dne_serve.problems import tell
from dne_serve.schemas import (
    ClassAnswer,
    ClassesAnswer,
    VersionAnswer,
    VersionsAnswer,
    VersionSummary,
)
from model_store.channel import Mode
from model_store.describe import details, summary
from model_store.errors import StoreError
from model_store.manifest import Manifest
from model_store.store import Store


def overview(
    store: Store, *, channel: str, served: int | None, mode: Mode | None
) -> VersionsAnswer:
    """One unreadable manifest does not hide the others."""
    manifests: dict[int, Manifest] = {}
    summaries = []
    for number in store.versions():
        try:
            manifest = store.manifest(number)
        except StoreError as error:
            summaries.append(VersionSummary(version=number, error=tell(error)))
            continue
        manifests[number] = manifest
        row = summary(manifest, parent=manifests.get(manifest.parent or 0))
        new = manifest.without_retired(manifest.new_classes)
        summaries.append(VersionSummary(**row, new_classes=list(new)))
    return VersionsAnswer(
        served=served,
        channel=channel,
        mode=mode,
        versions=summaries,
        history=store.history(channel),
    )


def describe(store: Store, version: int) -> VersionAnswer:
    manifest = store.manifest(version)
    found = details(manifest, parent=store.parent_of(manifest))
    return VersionAnswer(
        **{**found, **_records(manifest)}, temperature=manifest.calibration.temperature
    )


def _records(manifest: Manifest) -> dict[str, Any]:
    """The manifest's records as they are. A strict record does not take its own JSON back, where
    a tuple has become a list."""
    names = ("metrics", "calibration", "unknown", "preprocessing")
    return {
        "shards": list(dict.fromkeys(manifest.shards)),
        **{name: getattr(manifest, name) for name in names},
    }


def classes(manifest: Manifest) -> ClassesAnswer:
    return ClassesAnswer(
        version=manifest.version,
        classes=[
            ClassAnswer(label=label, task=task.name)
            for task in manifest.tasks
            for label in manifest.without_retired(task.classes)
        ],
    )
