"""Hold the answers that a report rests on: those recorded at publishing, or those counted anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_store.records.manifest import Manifest
from model_store.records.quality import Calibration
from model_store.report.ancestry import Ancestry
from model_store.report.record import Counts, Measured, ReportAccuracy, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Answers of a version to images that it was not trained on.

    `tasks` has the counts of each task for each version of the ancestry. `shares` are right answers
    by class, for versions without counts.
    """

    source: str
    images: int
    accuracy: ReportAccuracy
    confusion: Table
    tasks: Sequence[Sequence[Counts | None]]
    calibration: Calibration
    shares: Mapping[str, float]
    notes: tuple[str, ...] = ()


def recorded(manifest: Manifest, ancestry: Ancestry) -> Evidence:
    """Take over what was recorded when the version was made."""
    metrics = manifest.metrics
    return Evidence(
        source=metrics.source,
        images=metrics.images,
        accuracy=_recorded_accuracy(manifest),
        confusion=metrics.confusion,
        tasks=[ancestor.tasks for ancestor in ancestry.ancestors],
        calibration=manifest.calibration,
        shares=metrics.per_class,
        notes=_why_no_figures(manifest),
    )


def _recorded_accuracy(manifest: Manifest) -> ReportAccuracy:
    accuracy, gate = manifest.metrics.accuracy, manifest.metrics.gate
    old, new = (gate.old_images, gate.new_images) if gate else (None, None)
    return ReportAccuracy(
        all=Measured.of(accuracy.all, manifest.metrics.images),
        old=Measured.of(accuracy.old, old),
        new=Measured.of(accuracy.new, new),
        parent_old=Measured.of(accuracy.parent_old, old),
    )


def _why_no_figures(manifest: Manifest) -> tuple[str, ...]:
    """Say why a version has no figures of its own."""
    if manifest.metrics.gate is None and manifest.parent is not None:
        return (
            "Nothing was learnt in this version, and nothing was measured: the figures are those "
            f"of version {manifest.parent}, as far as they still hold.",
        )
    if not manifest.metrics.images:
        return ("This version has no report: no images were held out to judge it by.",)
    return ()
