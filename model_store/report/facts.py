"""Make the report of a version from its manifest, its ancestry and the answers that count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_store.preprocess import Thumbnail
from model_store.records.describe import gate_of, verdict
from model_store.records.manifest import ClassImages, Manifest, Scalar
from model_store.records.quality import Calibration, Gate, Unknown
from model_store.report.ancestry import Ancestry
from model_store.report.record import (
    Counts,
    Measured,
    ReportAccuracy,
    ReportBin,
    ReportCalibration,
    ReportClass,
    ReportConfused,
    ReportPicture,
    ReportTask,
    Table,
    VersionReport,
    count_right,
)
from model_store.store.shard import read_kept
from model_store.store.store import Store
from model_store.worth import proposal


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
    """Copy the answers that were recorded when the version was made."""
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
    """Explain why a version has no figures of its own."""
    if manifest.metrics.gate is None and manifest.parent is not None:
        return (
            "Nothing was learnt in this version, and nothing was measured: the figures are those "
            f"of version {manifest.parent}, as far as they still hold.",
        )
    if not manifest.metrics.images:
        return ("This version has no report: no images were held out to judge it by.",)
    return ()


def list_pictures(store: Store, manifest: Manifest) -> tuple[list[ReportPicture], str]:
    """List the pictures that are still there, and say why others are not."""
    metrics = manifest.metrics
    if not metrics.shown:
        return [], _why_none(manifest)
    forgotten = store.forgotten()
    gone = {name for name, entry in _entries(manifest).items() if entry.shard.sha256 in forgotten}
    listed = [
        ReportPicture(
            number=number,
            label=shown.class_name,
            answer=shown.answer,
            before=shown.before,
            confidence=shown.confidence,
        )
        for number, shown in enumerate(metrics.shown)
        if shown.class_name not in gone
    ]
    lost = sorted({shown.class_name for shown in metrics.shown} & gone)
    return listed, f"The pictures of {', '.join(lost)} were forgotten." if lost else ""


def read_picture_of(store: Store, manifest: Manifest, number: int) -> tuple[Thumbnail, str]:
    """Read one picture of the list and write it anew; give the digest of the kept image too. Raise
    ShardForgotten, KeptTooLarge or ImageRejected where it cannot be shown."""
    shown = manifest.metrics.shown[number]
    images = read_kept(store.read_stored_shard, _entries(manifest)[shown.class_name])
    data = images[shown.image]
    return Thumbnail.of(data), hashlib.sha256(data).hexdigest()


def _entries(manifest: Manifest) -> dict[str, ClassImages]:
    return {entry.class_name: entry for entry in manifest.held_out}


def _why_none(manifest: Manifest) -> str:
    metrics = manifest.metrics
    if metrics.gate is None:
        return "No picture is shown: nothing was learnt in this version."
    if metrics.source == "validation":
        return "No picture was kept: this version was judged by images outside the store."
    if not manifest.held_out:
        return "No picture was kept: this store keeps none, or no image was held out."
    if metrics.run is None:
        return "No picture was noted: older software made this version."
    return "No picture to show: every held-out image was answered right, as before."


_MOST_IN_MATRIX = 40
"""Classes of a matrix that can be read on a page."""
MOST_CLASSES = 500
_MOST_CONFUSED = 50
_MOST_CELLS = 2_000
"""Accuracies of tasks over versions: a plot of more cannot be read."""


def make_report(
    store: Store, manifest: Manifest, *, ancestry: Ancestry, evidence: Evidence | None = None
) -> VersionReport:
    """Report on a version. Without other evidence the recorded answers count."""
    answers = evidence or recorded(manifest, ancestry)
    metrics = manifest.metrics
    gate = metrics.gate or Gate(passed=True)
    tasks = tasks_of(manifest, answers.tasks)
    pictures, pictures_note = list_pictures(store, manifest)
    worth = proposal(store, manifest)
    return VersionReport(
        version=manifest.version,
        parent=manifest.parent,
        created=manifest.created,
        software=manifest.software,
        change=ancestry.ancestors[-1].grown.change,
        judged=metrics.gate is not None and metrics.images > 0,
        source=answers.source,
        images=answers.images,
        gate=gate_of(manifest),
        verdict=verdict(manifest),
        reasons=list(gate.reasons),
        notes=[*answers.notes, *gate.notes, *ancestry.notes],
        proposal=worth and str(worth),
        accuracy=answers.accuracy,
        classes=_worst(classes_of(manifest, answers)),
        all_classes=len(manifest.classes),
        retired=list(manifest.retired),
        matrix=_matrix(manifest.classes, answers.confusion),
        confused=confused_in(answers.confusion)[:_MOST_CONFUSED],
        worse=list(gate.worse),
        flipped=list(gate.flipped),
        got_worse=gate.got_worse,
        got_better=gate.got_better,
        tasks=_drawable(tasks, versions=len(ancestry.ancestors)),
        forgetting=average_forgetting(tasks),
        calibration=_calibration(answers.calibration),
        unknown=manifest.unknown,
        refused_known=_refused_known(manifest.unknown),
        latency=ancestry.latency,
        run=metrics.run,
        training=_training(manifest),
        growth=[ancestor.grown for ancestor in ancestry.ancestors],
        pictures=pictures,
        pictures_note=pictures_note,
    )


def classes_of(manifest: Manifest, answers: Evidence) -> list[ReportClass]:
    """Measure each class that is answered, in the order they were learnt. Without counts the
    recorded shares have to do."""
    answered: Counter[str] = Counter()
    for row in answers.confusion.values():
        answered.update(row)
    return [
        _class(name, task.name, answers, answered=answered[name])
        for task in manifest.tasks
        for name in manifest.without_retired(task.classes)
    ]


def _class(name: str, task: str, answers: Evidence, *, answered: int) -> ReportClass:
    right = answers.confusion.get(name, {}).get(name, 0)
    counted = Measured.of_counts(count_right(answers.confusion, [name]))
    return ReportClass(
        label=name,
        task=task,
        right=counted or Measured.of(answers.shares.get(name), None),
        precision=Measured.of_counts((right, answered)),
    )


def _worst(classes: list[ReportClass]) -> list[ReportClass]:
    """Keep the worst classes where there are more than a page can show."""
    if len(classes) <= MOST_CLASSES:
        return classes
    return sorted(classes, key=lambda row: row.right.share if row.right else 2.0)[:MOST_CLASSES]


def matrix_of(names: Sequence[str], table: Table) -> list[list[int]]:
    return [[table.get(name, {}).get(answer, 0) for answer in names] for name in names]


def _matrix(names: Sequence[str], table: Table) -> list[list[int]] | None:
    return matrix_of(names, table) if table and len(names) <= _MOST_IN_MATRIX else None


def confused_in(table: Table) -> list[ReportConfused]:
    """List the pairs of classes that were confused, the most frequent first."""
    pairs = [
        ReportConfused(label=label, taken_for=answer, images=count)
        for label, answers in table.items()
        for answer, count in answers.items()
        if label != answer
    ]
    return sorted(pairs, key=lambda pair: -pair.images)


def tasks_of(manifest: Manifest, counts: Sequence[Sequence[Counts | None]]) -> list[ReportTask]:
    """Measure each task in every version since it was learnt."""
    rows = []
    for place, task in enumerate(manifest.tasks):
        over = [tasks[place] if place < len(tasks) else None for tasks in counts]
        known = [pair for pair in over if pair is not None]
        shares = [pair[0] / pair[1] for pair in known]
        rows.append(
            ReportTask(
                name=task.name,
                classes=len(manifest.without_retired(task.classes)),
                learnt=Measured.of_counts(known[0]) if known else None,
                now=Measured.of_counts(over[-1]),
                accuracy=[pair and pair[0] / pair[1] for pair in over],
                forgotten=max(shares) - shares[-1] if over[-1] else None,
            )
        )
    return rows


def _drawable(tasks: list[ReportTask], *, versions: int) -> list[ReportTask]:
    if len(tasks) * versions <= _MOST_CELLS:
        return tasks
    return [task.model_copy(update={"accuracy": None}) for task in tasks]


def average_forgetting(tasks: Sequence[ReportTask]) -> float | None:
    """Average over all tasks but the newest, which had no time to be forgotten."""
    lost = [task.forgotten for task in tasks[:-1] if task.forgotten is not None]
    return sum(lost) / len(lost) if lost else None


def _refused_known(unknown: Unknown | None) -> Measured | None:
    if unknown is None or not unknown.images:
        return None
    return Measured.of(max(unknown.rate, 1 / (unknown.images + 1)), unknown.images)


def _calibration(calibration: Calibration) -> ReportCalibration:
    return ReportCalibration(
        temperature=calibration.temperature,
        before=calibration.before,
        after=calibration.after,
        images=calibration.images,
        bins=[
            ReportBin(
                low=counted.low,
                high=counted.high,
                confidence=counted.confidence,
                right=Measured.on(counted.images, counted.right / counted.images),
            )
            for counted in calibration.bins
        ],
    )


def _training(manifest: Manifest) -> dict[str, Scalar]:
    """Return the figures of the run where they are those of this version, not of an older one."""
    learnt = manifest.metrics.gate is not None and not manifest.extended
    return dict(manifest.tasks[-1].training) if learnt else {}
