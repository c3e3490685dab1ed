"""Turn the counts in a manifest into shares with intervals."""

from __future__ import annotations

from collections.abc import Collection

from dne_serve.reports.schemas import (
    Measured,
    ReportAccuracy,
    ReportBin,
    ReportCalibration,
    ReportClass,
    ReportConfused,
)
from model_store.records.manifest import Manifest
from model_store.records.quality import Calibration
from model_store.tables import likely_range

MOST_IN_MATRIX = 40
"""Classes of a matrix that can be read on a page."""
MOST_CLASSES = 500
MOST_CONFUSED = 50


def measured(share: float | None, images: int | None) -> Measured | None:
    """Put a share beside its interval; nothing where nothing was measured."""
    if share is None:
        return None
    return _interval(share, images) if images else Measured(share=share)


def of_counts(right: int, images: int) -> Measured | None:
    return _interval(right / images, images) if images else None


def _interval(share: float, images: int) -> Measured:
    share = min(max(share, 0.0), 1.0)  # a record may hold anything
    low, high = likely_range(share, images)
    return Measured(share=share, images=images, low=round(low, 4), high=round(high, 4))


def accuracy_of(manifest: Manifest) -> ReportAccuracy:
    accuracy, gate = manifest.metrics.accuracy, manifest.metrics.gate
    old, new = (gate.old_images, gate.new_images) if gate else (None, None)
    return ReportAccuracy(
        all=measured(accuracy.all, manifest.metrics.images),
        old=measured(accuracy.old, old),
        new=measured(accuracy.new, new),
        parent_old=measured(accuracy.parent_old, old),
    )


def right_of(manifest: Manifest, names: Collection[str]) -> tuple[int, int] | None:
    """Count the right answers and the images of some classes; None where none is recorded."""
    table = manifest.metrics.confusion
    rows = [(name, table[name]) for name in names if name in table]
    images = sum(sum(answers.values()) for _, answers in rows)
    return (sum(answers.get(name, 0) for name, answers in rows), images) if images else None


def classes_of(manifest: Manifest) -> list[ReportClass]:
    """Measure each class that is answered, in the order they were learnt; of very many classes the
    worst ones. Without counts the recorded shares have to do."""
    table, shares = manifest.metrics.confusion, manifest.metrics.per_class
    answered: dict[str, int] = {}
    for answers in table.values():
        for name, count in answers.items():
            answered[name] = answered.get(name, 0) + count
    found = []
    for task in manifest.tasks:
        for name in manifest.without_retired(task.classes):
            right = table.get(name, {}).get(name, 0)
            images = sum(table.get(name, {}).values())
            found.append(
                ReportClass(
                    label=name,
                    task=task.name,
                    right=of_counts(right, images) or measured(shares.get(name), None),
                    precision=of_counts(right, answered.get(name, 0)),
                )
            )
    if len(found) <= MOST_CLASSES:
        return found
    return sorted(found, key=lambda one: one.right.share if one.right else 2.0)[:MOST_CLASSES]


def matrix_of(manifest: Manifest) -> list[list[int]] | None:
    names, table = manifest.classes, manifest.metrics.confusion
    if not table or len(names) > MOST_IN_MATRIX:
        return None
    return [[table.get(name, {}).get(answer, 0) for answer in names] for name in names]


def confused_in(manifest: Manifest) -> list[ReportConfused]:
    """List the pairs of classes that were confused most often."""
    pairs = [
        ReportConfused(label=label, taken_for=answer, images=count)
        for label, answers in manifest.metrics.confusion.items()
        for answer, count in answers.items()
        if label != answer
    ]
    return sorted(pairs, key=lambda one: -one.images)[:MOST_CONFUSED]


def calibration_of(calibration: Calibration) -> ReportCalibration:
    return ReportCalibration(
        temperature=calibration.temperature,
        before=calibration.before,
        after=calibration.after,
        images=calibration.images,
        bins=[
            ReportBin(
                low=one.low,
                high=one.high,
                confidence=one.confidence,
                right=_interval(one.right / one.images, one.images),
            )
            for one in calibration.bins
        ],
    )
