"""Describe versions from their manifests, in the words of `dne-store --json`. Loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dne_serve.errors import public_message
from dne_serve.http.schemas import (
    ClassAnswer,
    ClassesAnswer,
    GrowthAnswer,
    VersionAnswer,
    VersionsAnswer,
    VersionSummary,
)
from model_store.backends.base import Entry
from model_store.errors import StoreError
from model_store.records.channel import ChannelRecord, Mode
from model_store.records.describe import details, summary
from model_store.records.manifest import Manifest
from model_store.store.store import Store
from model_store.store.summaries import Keep, Row, key_of, read_page
from model_store.tables import likely_range
from model_store.worth import proposal, proposed

_SHOWN_RECORDS = 100
MAX_RECORD_BYTES = 4 << 20  # of kept channel records


class Overviews:
    """Builds the answers to `GET /versions`. It keeps rows and records, as pages ask repeatedly."""

    def __init__(self) -> None:
        self._rows = Keep()
        self._records = Keep(max_bytes=MAX_RECORD_BYTES)

    def page(
        self,
        store: Store,
        *,
        channel: str,
        served: int | None,
        mode: Mode | None,
        moves_refused: str | None,
        before: int | None,
        limit: int,
    ) -> VersionsAnswer:
        """Build one page. An unreadable manifest or record does not hide the others."""
        page = read_page(store, describe=_row, keep=self._rows, before=before, limit=limit)
        history, problems = self._history(store, channel)
        return VersionsAnswer(
            served=served,
            channel=channel,
            mode=mode,
            moves_refused=moves_refused,
            versions=[_summary(number, row) for number, row in page.rows],
            total=page.total,
            next_before=page.next_before,
            history=history,
            problems=problems,
            growth=_growth(store, dict(page.rows), history),
        )

    def _history(self, store: Store, channel: str) -> tuple[list[ChannelRecord], list[str]]:
        """Read the newest records of a channel, oldest first, and the faults of unreadable ones."""
        history: list[ChannelRecord] = []
        problems: list[str] = []
        newest = store.record_numbers(channel)[-_SHOWN_RECORDS:]
        entries = store.record_entries(channel, since=newest[0]) if newest else {}
        for number, entry in sorted(entries.items()):
            try:
                history.append(self._record(store, channel, number, entry))
            except StoreError as error:
                problems.append(public_message(error))
        return history, problems

    def _record(self, store: Store, channel: str, number: int, entry: Entry) -> ChannelRecord:
        key = key_of(store, entry)
        kept = self._records.get(key)
        if kept is not None:
            return ChannelRecord.model_validate_json(kept)
        record = store.record(channel, number)
        self._records.put(key, record.model_dump_json().encode())
        return record


def _row(manifest: Manifest, base: Manifest | None) -> Row:
    new = manifest.without_retired(manifest.new_classes)
    row = summary(manifest, parent=base)
    return {
        **row,
        "new_classes": list(new),
        "likely": _likely(manifest),
        "worth": proposed(manifest) is not None,
    }


def _growth(
    store: Store, rows: Mapping[int, Row | StoreError], history: Sequence[ChannelRecord]
) -> GrowthAnswer | None:
    """Propose to adapt the version that the channel names, if the page has it."""
    head = rows.get(history[-1].target) if history else None
    if head is None or isinstance(head, StoreError) or not head["worth"]:
        return None
    version: int = head["version"]
    try:
        worth = proposal(store, store.manifest(version))
    except StoreError:  # its row says so as soon as it is read again
        return None
    return None if worth is None else GrowthAnswer(version=version, says=str(worth))


def _likely(manifest: Manifest) -> dict[str, tuple[float, float] | None]:
    """Compute the interval of each accuracy that was measured on a known number of images."""
    accuracy, gate = manifest.metrics.accuracy, manifest.metrics.gate
    measured = {"all": (accuracy.all, manifest.metrics.images)}
    if gate is not None:
        measured["old"] = (accuracy.old, gate.old_images)
        measured["new"] = (accuracy.new, gate.new_images)
    return {name: _interval(share, images) for name, (share, images) in measured.items()}


def _interval(share: float | None, images: int) -> tuple[float, float] | None:
    if share is None or not images or not 0 <= share <= 1:  # a record may hold any number
        return None
    low, high = likely_range(share, images)
    return round(low, 4), round(high, 4)


def _summary(number: int, row: Row | StoreError) -> VersionSummary:
    if isinstance(row, StoreError):
        return VersionSummary(version=number, error=public_message(row))
    # Through JSON: a strict record does not take a list for its tuples otherwise.
    return VersionSummary.model_validate_json(json.dumps(row))


def describe(store: Store, version: int) -> VersionAnswer:
    manifest = store.manifest(version)
    described = details(manifest, parent=store.parent_of(manifest))
    return VersionAnswer(
        **{**described, **_records(manifest)}, temperature=manifest.calibration.temperature
    )


def _records(manifest: Manifest) -> dict[str, Any]:
    """Take the records of a manifest as objects: a strict record refuses its own JSON, in which a
    tuple has become a list."""
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
