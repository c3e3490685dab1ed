"""Report on a version, measured on its held-out images, which are never trained on.

All older versions of a lineage are measured in the same pass: the newest network has all their
experts. Without held-out images in the store the figures are those of the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.advice.kept import read_advice
from model_store.advice.lines import described
from model_store.codec import load_network
from model_store.errors import ShardForgotten, WriteFailed
from model_store.inference.forward import Lineage
from model_store.network.device import choose_device
from model_store.network.expert import Expert
from model_store.records.describe import verdict
from model_store.records.manifest import ClassImages, Manifest
from model_store.store.store import Store
from model_store.tables import likely_range
from trainer.data.exemplars import recall
from trainer.data.folders import LabelledImages
from trainer.evaluation.judged import Judged, judged_by
from trainer.evaluation.levels import measure_levels
from trainer.progress import Progress
from trainer.report.history import growth, lineage_of
from trainer.report.html import page
from trainer.request import Report
from trainer.tokens.passes import in_batches

CONFUSIONS_NAMED = 20

Counts = NDArray[np.int64]


def write_report(request: Report, *, progress: Progress) -> tuple[dict[str, Any], list[Path]]:
    """Write `report.html` and `report.json`. Return the report and the two paths."""
    store = Store.open(request.store)
    manifest = store.manifest(request.version)
    report = make_report(store, manifest, device=request.device, progress=progress)
    written = {
        "report.json": json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.html": page(report),
    }
    paths = [request.out / name for name in written]
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, written.values(), strict=True):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise WriteFailed(f"cannot write to {request.out}: {error.strerror}") from error
    return report, paths


def make_report(
    store: Store, manifest: Manifest, *, device: str, progress: Progress
) -> dict[str, Any]:
    lineage = lineage_of(store, manifest)
    images, notes = _held_out(store, manifest)
    judged_in = _judge_all(store, lineage, images, device=device, progress=progress)
    judged = judged_in[manifest.version]
    newest = manifest.without_retired(manifest.tasks[-1].classes)
    older = [name for name in manifest.classes if name not in newest]
    counts = _counted(manifest, judged) if len(images) else _kept(manifest)
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "digest": manifest.digest,
        "images": int(counts.sum()),
        "source": "held-out" if len(images) else "recorded" if counts.any() else "none",
        "verdict": verdict(manifest),
        "notes": notes,
        "accuracy": {
            "all": _right(counts),
            "old": _right(counts, rows=[manifest.classes.index(name) for name in older]),
            "new": _right(counts, rows=[manifest.classes.index(name) for name in newest]),
            "interval": _interval(counts),
        },
        "recorded": manifest.metrics.model_dump(mode="json"),
        "classes": _by_class(manifest, counts),
        "retired": list(manifest.retired),
        "confusion": _confusion(manifest, counts),
        "forgetting": _forgetting(manifest, lineage, judged_in),
        "calibration": _calibration(manifest, judged),
        "levels": measure_levels(
            judged, manifest.hierarchy, temperature=manifest.calibration.temperature
        ),
        "growth": growth(store, lineage),
        "advice": described(read_advice(store, manifest)),
    }


def _held_out(store: Store, manifest: Manifest) -> tuple[LabelledImages, list[str]]:
    """Read the held-out images, and note the missing ones."""
    there: list[ClassImages] = []
    notes: list[str] = []
    for entry in manifest.held_out:
        try:
            store.read_shard(entry.shard)
            there.append(entry)
        except ShardForgotten:
            notes.append(f"The held-out images of {entry.class_name} were forgotten.")
    named = {entry.class_name for entry in manifest.held_out}
    without = [name for name in manifest.classes if name not in named]
    if without:
        bare = not manifest.image_shards and manifest.statistics
        why = "it keeps statistics and no pictures" if bare else "too few images"
        notes.append(f"Nothing is held out of {', '.join(without)}: {why}.")
    images = recall(
        there,
        classes=manifest.spec.classes,
        read=store.read_shard,
        preprocessing=manifest.preprocessing,
    )
    return images, notes


def _judge_all(
    store: Store,
    lineage: Sequence[Manifest],
    images: LabelledImages,
    *,
    device: str,
    progress: Progress,
) -> dict[int, Judged]:
    """Judge every version by the images, with the classes in the newest version's order."""
    newest = lineage[-1]
    bank: dict[str, Expert] = {}
    network = load_network(store.read_shard, newest, known=bank).to(choose_device(device))

    whole_token = Lineage.of(network).token

    def token(images_BCHW: Tensor) -> Tensor:
        phase.advance(len(images_BCHW))
        return whole_token(images_BCHW)

    with progress.phase("judging", total=len(images)) as phase:
        token_NW = in_batches(
            network, images.pixels_NHWC, token, preprocessing=newest.preprocessing
        )
    found = {}
    for one in lineage:
        # The bank has the experts of all versions, so only the classifier is read.
        heads = load_network(store.read_shard, one, known=bank).heads.to(network.device)
        logits = np.full((len(images), len(images.classes)), -np.inf, dtype=np.float32)
        if len(images):
            with torch.inference_mode():
                given = network.classify([torch.from_numpy(token_NW).to(network.device)], heads)
            logits[:, : given.shape[1]] = given.cpu().numpy()
        gone = [newest.spec.classes[one.spec.classes.index(name)] for name in one.retired]
        found[one.version] = judged_by(logits, images, retired=gone)
    return found


def _counted(manifest: Manifest, judged: Judged) -> Counts:
    """Count classes (rows) and answers (columns), in the order of `manifest.classes`."""
    places = list(manifest.places)
    size = len(judged.classes)
    counts = np.zeros((size, size), dtype=np.int64)
    np.add.at(counts, (judged.labels_N, judged.logits_NC.argmax(axis=1)), 1)
    return counts[np.ix_(places, places)]


def _kept(manifest: Manifest) -> Counts:
    """Read the same counts from the manifest."""
    table, names = manifest.metrics.confusion, manifest.classes
    rows = [[table.get(one, {}).get(answer, 0) for answer in names] for one in names]
    return np.array(rows, dtype=np.int64)


def _by_class(manifest: Manifest, counts: Counts) -> list[dict[str, Any]]:
    """Measure recall, as `accuracy`, and precision of each class."""
    rows = []
    for task in manifest.tasks:
        for name in manifest.without_retired(task.classes):
            place = manifest.classes.index(name)
            rows.append(
                {
                    "name": name,
                    "task": task.name,
                    "images": int(counts[place].sum()),
                    "accuracy": _right(counts, rows=[place]),
                    "precision": _share(counts[place, place], of=counts[:, place].sum()),
                }
            )
    return rows


def _confusion(manifest: Manifest, counts: Counts) -> dict[str, Any]:
    names = manifest.classes
    apart = [
        {"is": names[row], "taken_for": names[column], "images": int(counts[row, column])}
        for row, column in np.argwhere(counts)
        if row != column
    ]
    apart.sort(key=lambda one: -int(str(one["images"])))
    return {
        "classes": list(names),
        "counts": counts.tolist(),
        "most_frequent": apart[:CONFUSIONS_NAMED],
    }


def _forgetting(
    manifest: Manifest, lineage: Sequence[Manifest], judged_in: dict[int, Judged]
) -> dict[str, Any]:
    """Measure each task in every version since it was learnt.

    Forgetting is the best accuracy of a task minus the newest. The average leaves out the newest
    task, which had no time to be forgotten.
    """
    tasks = []
    for index, task in enumerate(manifest.tasks):
        names = manifest.without_retired(task.classes)
        over = [
            judged_in[one.version].accuracy(names) if len(one.tasks) > index else None
            for one in lineage
        ]
        known = [share for share in over if share is not None]
        tasks.append(
            {
                "name": task.name,
                "classes": len(names),
                "accuracy": over,
                "learnt": known[0] if known else None,
                "now": over[-1],
                "forgetting": max(known) - known[-1] if known else None,
            }
        )
    lost = [one["forgetting"] for one in tasks[:-1] if one["forgetting"] is not None]
    return {
        "versions": [one.version for one in lineage],
        "tasks": tasks,
        "average": float(np.mean(np.array(lost, dtype=np.float64))) if lost else None,
    }


def _calibration(manifest: Manifest, judged: Judged) -> dict[str, Any]:
    """Compare confidence and accuracy in bins.

    The temperature was chosen on these very images. `recorded` has the manifest's errors, which
    were measured on images that the temperature was not fitted to.
    """
    temperature = manifest.calibration.temperature
    return {
        "temperature": temperature,
        "error": judged.calibration_error(temperature=temperature),
        "error_without": judged.calibration_error(temperature=1.0),
        "bins": [
            {
                "from": one.low,
                "to": one.high,
                "images": one.images,
                "confidence": one.confidence,
                "accuracy": one.right / one.images,
            }
            for one in judged.bins(temperature)
        ],
        "recorded": manifest.calibration.model_dump(mode="json"),
    }


def _right(counts: Counts, *, rows: Sequence[int] | None = None) -> float | None:
    """Return the share of right answers for the images of all rows, or of these."""
    right = counts.diagonal()
    chosen = slice(None) if rows is None else list(rows)
    return _share(right[chosen].sum(), of=counts[chosen].sum())


def _share(part: np.int64, *, of: np.int64) -> float | None:
    return float(part / of) if of else None


def _interval(counts: Counts) -> list[float] | None:
    """Compute the 95 % interval of the accuracy."""
    count, share = int(counts.sum()), _right(counts)
    return None if share is None else list(likely_range(share, count))
