"""Judge a student by images that it was not trained on: figures, calibration, verdict."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from model_store.inference.forward import Lineage
from model_store.records.quality import Accuracy, Calibration, Metrics, Unknown
from model_store.tables import counted
from trainer.data.folders import LabelledImages
from trainer.data.sampling import can_be_balanced
from trainer.data.task_data import TaskData
from trainer.evaluation.calibrate import calibrate
from trainer.evaluation.forecast import latencies_ms
from trainer.evaluation.gate import FEWEST, Candidate, decide, noticed
from trainer.evaluation.judged import Judged, in_batches, judged_by
from trainer.evaluation.precision_agreement import agreement_of
from trainer.evaluation.unknown import fit_threshold
from trainer.learning.student import Student
from trainer.progress import Progress
from trainer.request import GateLimits

TIMED_RUNS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    metrics: Metrics
    calibration: Calibration
    unknown: Unknown | None


def assess(
    student: Student,
    *,
    experts: Lineage,
    data: TaskData,
    limits: GateLimits,
    unknown_rate: float,
    model_bytes: int,
) -> Assessment:
    newest, older = student.new_classes, _older(student)
    judged, parent = _judge_both(student, data, experts)
    gate = decide(
        Candidate(
            judged=judged,
            parent=parent,
            older=older,
            newest=newest,
            model_bytes=model_bytes,
            latency_ms=_latency_ms(student, experts) if limits.max_latency_ms else None,
        ),
        limits=limits,
    )
    images = len(data.judged_by)
    return Assessment(
        metrics=Metrics(
            accuracy=Accuracy(
                all=judged.accuracy(),
                old=judged.accuracy(older),
                new=judged.accuracy(newest),
                parent_old=parent.accuracy(older) if parent else None,
            ),
            per_class=judged.per_class(),
            images=images,
            source=data.source if images else "none",
            confusion=judged.confusion() if images else {},
            gate=gate,
            agreement=agreement_of(
                student.network,
                images=data.judged_by,
                judged=judged,
                preprocessing=student.preprocessing,
            ),
        ),
        calibration=calibrate(
            judged, older=older, newest=newest, fitted_on=_classifier_images(student, data)
        ),
        unknown=fit_threshold(judged.logits_NC, rate=unknown_rate),
    )


def say_evidence(
    student: Student, *, data: TaskData, limits: GateLimits, progress: Progress
) -> None:
    """Tell before learning by how many images the gate will judge."""
    images = data.judged_by
    new = _count_of(images, student.new_classes)
    says = f"the gate will judge by {counted(new, 'image')} of new classes"
    if student.extends:
        all_images = _count_of(images, _older(student))
        says = f"the gate will judge by {counted(all_images, 'image')} of all classes"
        says += _power(all_images)
    elif student.teacher is not None:
        old_images = _count_of(images, _older(student))
        says += f" and {old_images} of old ones{_power(old_images)}"
    if limits.min_new and new < FEWEST["new"]:
        says += f"; --min-new needs {FEWEST['new']} of new classes, give more with --val-data DIR"
    progress.note(says)


def _power(old_images: int) -> str:
    """Say what the images of classes that were there before are good for."""
    if old_images < FEWEST["old"]:
        return ""
    times = round(10 * noticed(old_images))
    often = f"about {times} times in 10" if times else "hardly ever"
    return f"; they notice a fall of 5 points {often}"


def _count_of(images: LabelledImages, names: tuple[str, ...]) -> int:
    return sum(len(images.rows_of(name)) for name in names)


def _older(student: Student) -> tuple[str, ...]:
    """List the old classes: in an extension all, because each has to be as good as before."""
    newest, classes = student.new_classes, student.network.spec.classes
    return tuple(name for name in classes if student.extends or name not in newest)


def _classifier_images(student: Student, data: TaskData) -> int:
    """Count the images that gave the classifier a temperature of its own; 0 without one."""
    images = data.for_training
    fitted = student.on_pretrained and can_be_balanced(images, retired=data.retired)
    return len(images) if fitted else 0


def _latency_ms(student: Student, experts: Lineage) -> float:
    return median(latencies_ms(student.network, experts, runs=TIMED_RUNS))


def _judge_both(student: Student, data: TaskData, experts: Lineage) -> tuple[Judged, Judged | None]:
    """Judge the student and its parent by the same images, in one pass over them."""
    network, teacher, images = student.network, student.teacher, data.judged_by
    classes = len(network.spec.classes)

    def read(images_BCHW: Tensor) -> Tensor:
        slices = [experts.token(images_BCHW)]
        mine = network.classify(slices)
        return torch.cat([mine, network.classify(slices, teacher.heads)], 1) if teacher else mine

    logits = in_batches(network, images, read, preprocessing=student.preprocessing)
    if not len(images):
        logits = np.zeros((0, classes + (teacher.classes if teacher else 0)), dtype=np.float32)
    mine, parents = logits[:, :classes], logits[:, classes:]
    judged = judged_by(mine, images, retired=data.retired)
    return judged, judged_by(parents, images, retired=data.retired) if teacher else None
