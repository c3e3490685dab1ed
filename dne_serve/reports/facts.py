"""Collect the report of a version from its manifest and from those of its ancestors."""

from __future__ import annotations

from dne_serve.reports.lineage import Lineages
from dne_serve.reports.measures import (
    accuracy_of,
    calibration_of,
    classes_of,
    confused_in,
    matrix_of,
)
from dne_serve.reports.pictures import list_pictures
from dne_serve.reports.schemas import ReportAnswer
from model_store.records.describe import gate_of, verdict
from model_store.records.manifest import Manifest, Scalar
from model_store.records.quality import Gate
from model_store.store.store import Store


def make_report(store: Store, manifest: Manifest, *, lineages: Lineages) -> ReportAnswer:
    metrics = manifest.metrics
    gate = metrics.gate or Gate(passed=True)
    lineage = lineages.of(store, manifest)
    pictures, pictures_note = list_pictures(store, manifest)
    return ReportAnswer(
        version=manifest.version,
        parent=manifest.parent,
        created=manifest.created,
        software=manifest.software,
        change=lineage.ancestors[-1].grown.change,
        judged=metrics.gate is not None and metrics.images > 0,
        source=metrics.source,
        images=metrics.images,
        gate=gate_of(manifest),
        verdict=verdict(manifest),
        reasons=list(gate.reasons),
        notes=[*_notes(manifest), *gate.notes, *lineage.notes],
        accuracy=accuracy_of(manifest),
        classes=classes_of(manifest),
        all_classes=len(manifest.classes),
        retired=list(manifest.retired),
        matrix=matrix_of(manifest),
        confused=confused_in(manifest),
        worse=list(gate.worse),
        flipped=list(gate.flipped),
        got_worse=gate.got_worse,
        got_better=gate.got_better,
        tasks=lineage.tasks_of(manifest),
        calibration=calibration_of(manifest.calibration),
        unknown=manifest.unknown,
        latency=lineage.latency,
        run=metrics.run,
        training=_training(manifest),
        growth=[one.grown for one in lineage.ancestors],
        pictures=pictures,
        pictures_note=pictures_note,
    )


def _notes(manifest: Manifest) -> list[str]:
    """Say why a version has no report of its own."""
    if manifest.metrics.gate is None and manifest.parent is not None:
        return [
            "Nothing was learnt in this version, and nothing was measured: the figures are those "
            f"of version {manifest.parent}, as far as they still hold."
        ]
    if not manifest.metrics.images:
        return ["This version has no report: no images were held out to judge it by."]
    return []


def _training(manifest: Manifest) -> dict[str, Scalar]:
    """Give the figures of the run where they are those of this version, and not of an older one."""
    learnt = manifest.metrics.gate is not None and not manifest.extended
    return dict(manifest.tasks[-1].training) if learnt else {}
