"""Measure a version anew on its held-out images, which are never trained on.

All older versions of a lineage are measured in the same pass: the newest network has all their
experts. Without held-out images in the store the recorded answers count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_store.codec import load_network
from model_store.errors import ShardForgotten
from model_store.inference.forward import Lineage
from model_store.network.device import choose_device
from model_store.network.expert import Expert
from model_store.records.manifest import ClassImages, Manifest
from model_store.records.quality import Calibration, CalibrationError
from model_store.report.ancestry import Ancestry
from model_store.report.facts import Evidence, recorded
from model_store.report.record import Counts, Measured, ReportAccuracy, Table, count_right
from model_store.store.store import Store
from trainer.data.exemplars import recall
from trainer.data.folders import LabelledImages
from trainer.embeddings.cache import in_batches
from trainer.embeddings.reading import reader_of
from trainer.evaluation.judged import Judged, judged_by
from trainer.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAnew:
    """The answers that a report rests on. `judged` is None where no held-out image is left, and
    `missing` names the images that are not there."""

    evidence: Evidence
    judged: Judged | None
    missing: tuple[str, ...]


def measure(
    store: Store, manifest: Manifest, *, ancestry: Ancestry, device: str, progress: Progress
) -> MeasuredAnew:
    images, missing = _held_out(store, manifest)
    if not len(images):
        kept = recorded(manifest, ancestry)
        kept = replace(kept, notes=(*missing, *kept.notes))
        return MeasuredAnew(evidence=kept, judged=None, missing=missing)
    versions = [
        manifest if number == manifest.version else store.manifest(number)
        for number in (ancestor.grown.version for ancestor in ancestry.ancestors)
    ]
    judged_in = _judge_all(store, versions, images, device=device, progress=progress)
    judged = judged_in[manifest.version]
    evidence = _evidence(manifest, versions, judged_in)
    evidence = replace(evidence, notes=missing)
    return MeasuredAnew(evidence=evidence, judged=judged, missing=missing)


def _held_out(store: Store, manifest: Manifest) -> tuple[LabelledImages, tuple[str, ...]]:
    """Read the held-out images, and name the missing ones."""
    there: list[ClassImages] = []
    missing: list[str] = []
    for entry in manifest.held_out:
        try:
            store.read_shard(entry.shard)
            there.append(entry)
        except ShardForgotten:
            missing.append(f"The held-out images of {entry.class_name} were forgotten.")
    named = {entry.class_name for entry in manifest.held_out}
    without = [name for name in manifest.classes if name not in named]
    if without:
        bare = not manifest.image_shards and manifest.statistics
        why = "it keeps statistics and no pictures" if bare else "too few images"
        missing.append(f"Nothing is held out of {', '.join(without)}: {why}.")
    images = recall(
        there,
        classes=manifest.spec.classes,
        read=store.read_shard,
        preprocessing=manifest.preprocessing,
    )
    return images, tuple(missing)


def _judge_all(
    store: Store,
    versions: Sequence[Manifest],
    images: LabelledImages,
    *,
    device: str,
    progress: Progress,
) -> dict[int, Judged]:
    """Judge every version by the images, with the classes in the newest version's order."""
    newest = versions[-1]
    bank: dict[str, Expert] = {}
    network = load_network(store.read_shard, newest, known=bank).to(choose_device(device))
    whole_token = reader_of(network, Lineage.of(network))

    def token(images_BCHW: Tensor) -> Tensor:
        phase.advance(len(images_BCHW))
        return whole_token(images_BCHW)

    with progress.phase("judging", total=len(images)) as phase:
        token_NW = in_batches(
            network, images.pixels_NHWC, token, preprocessing=newest.preprocessing
        )
    tokens = [torch.from_numpy(token_NW).to(network.device)]
    judged_in = {}
    for manifest in versions:
        # The bank has the experts of all versions, so only the classifier is read.
        heads = load_network(store.read_shard, manifest, known=bank).heads.to(network.device)
        logits = np.full((len(images), len(images.classes)), -np.inf, dtype=np.float32)
        with torch.inference_mode():
            answered = network.classify(tokens, heads)
        logits[:, : answered.shape[1]] = answered.cpu().numpy()
        gone = [newest.spec.classes[manifest.spec.classes.index(name)] for name in manifest.retired]
        judged_in[manifest.version] = judged_by(logits, images, retired=gone)
    return judged_in


def _evidence(
    manifest: Manifest, versions: Sequence[Manifest], judged_in: dict[int, Judged]
) -> Evidence:
    judged = judged_in[manifest.version]
    living = frozenset(manifest.classes)
    confusion = {name: answers for name, answers in judged.confusion().items() if name in living}
    parent = judged_in.get(manifest.parent) if manifest.parent is not None else None
    return Evidence(
        source="held-out",
        images=sum(sum(answers.values()) for answers in confusion.values()),
        accuracy=_accuracy(manifest, confusion, parent),
        confusion=confusion,
        tasks=[
            [
                _counts(judged_in[version.version], manifest.without_retired(task.classes))
                for task in manifest.tasks[: len(version.tasks)]
            ]
            for version in versions
        ],
        calibration=_calibration(manifest.calibration.temperature, judged),
        shares={},
    )


def _accuracy(manifest: Manifest, confusion: Table, parent: Judged | None) -> ReportAccuracy:
    newest = manifest.without_retired(manifest.tasks[-1].classes)
    older = [name for name in manifest.classes if name not in newest]
    return ReportAccuracy(
        all=Measured.of_counts(count_right(confusion, manifest.classes)),
        old=Measured.of_counts(count_right(confusion, older)),
        new=Measured.of_counts(count_right(confusion, newest)),
        parent_old=Measured.of_counts(_counts(parent, older)) if parent else None,
    )


def _counts(judged: Judged, names: Collection[str]) -> Counts | None:
    chosen_N = judged.is_of(names)
    images = int(chosen_N.sum())
    return (int(judged.right_N[chosen_N].sum()), images) if images else None


def _calibration(temperature: float, judged: Judged) -> Calibration:
    """Compare confidence and accuracy. The temperature was chosen on these very images."""
    return Calibration(
        temperature=temperature,
        before=CalibrationError(all=judged.calibration_error(temperature=1.0)),
        after=CalibrationError(all=judged.calibration_error(temperature=temperature)),
        images=len(judged.labels_N),
        bins=judged.bins(temperature),
    )
