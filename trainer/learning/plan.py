"""Choose how long and how fast to learn from the number of images, unless the user has said.

Describe a run by everything that decides its weights: equal descriptions are one run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from model_store import __version__
from trainer.data.folders import LabelledImages
from trainer.data.sampling import (
    DrawEpoch,
    balanced,
    can_be_balanced,
    epoch_size,
    evened,
)
from trainer.data.task_data import TaskData
from trainer.learning.checkpoint import Configuration
from trainer.learning.student import Student
from trainer.request import Effort, Learning

LEARNING, BALANCING, EXTENDING = "learning", "balancing", "extending"
"""The phases of learning by steps."""


def learning_epoch(student: Student, images: LabelledImages) -> DrawEpoch:
    """Draw equal shares of new classes beside old images."""
    return evened(images, among=student.new_classes)


def balanced_epoch(data: TaskData) -> DrawEpoch:
    """Draw equal shares of all classes."""
    return balanced(data.for_training, retired=data.retired)


def log_counts(draw_epoch: DrawEpoch, images: LabelledImages) -> Tensor:
    """Return the logarithms of the images that an epoch has of each class; of none as of one."""
    drawn = images.labels_N[draw_epoch(np.random.default_rng(0))]
    counts = np.bincount(drawn, minlength=len(images.classes))
    return torch.from_numpy(np.log(np.maximum(counts, 1))).float()


def is_balanced_in_loss(loss: str) -> bool:
    """Return whether the loss itself makes up for classes with few images (ADR 126)."""
    return loss == "cross-entropy"


def tunes(student: Student, data: TaskData, *, loss: str) -> bool:
    """Return whether balanced tuning follows learning."""
    return (
        student.teacher is not None
        and not is_balanced_in_loss(loss)
        and can_be_balanced(data.for_training, retired=data.retired)
    )


def tuning_plan(plan: Plan, student: Student, data: TaskData) -> Plan:
    return plan.for_tuning(
        learnt=epoch_size(learning_epoch(student, data.for_training)),
        balanced=epoch_size(balanced_epoch(data)),
    )


STEPS = 200
"""The steps for a small set of images; MIN_EPOCHS gives larger sets more."""
MIN_EPOCHS = 20
MAX_EPOCHS = 300
BATCH = 64
RATE = 1e-3
MUON_RATE = 2e-3
"""The rate of AdamW beside Muon, which learns an expert from scratch (ADR 127)."""
RATE_WIDTH = 128
"""The width for which RATE is meant; wider networks learn more slowly."""
PRETRAINED_PASSES = 1600
"""Images in all epochs together, for the last blocks of a pre-trained expert."""
PRETRAINED_MIN_EPOCHS = 3
PRETRAINED_BATCH = 16
TUNING_SHARE = 0.35
"""The steps of balanced tuning for each step of learning; see ADR 48."""
TUNING_RATE_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The length and rate of learning."""

    epochs: int
    batch_size: int
    learning_rate: float

    def for_tuning(self, *, learnt: int, balanced: int) -> Plan:
        """Plan the balanced tuning that follows: shorter and slower. An epoch of `balanced` images
        may be much shorter than one of `learnt` images."""
        return Plan(
            epochs=max(1, round(TUNING_SHARE * self.epochs * learnt / balanced)),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate * TUNING_RATE_SHARE,
        )


def make_plan(effort: Effort, *, images: int, width: int) -> Plan:
    batch_size = effort.batch_size or BATCH
    return Plan(
        epochs=effort.epochs or _epochs(STEPS * batch_size, images, least=MIN_EPOCHS),
        batch_size=batch_size,
        learning_rate=effort.learning_rate or rate_of(width, rate=MUON_RATE),
    )


def make_plan_on_pretrained(effort: Effort, *, images: int, width: int) -> Plan:
    """Plan the learning of a pre-trained expert's last blocks. Fewer images suffice: each is large,
    and the expert knows most of its content."""
    return Plan(
        epochs=effort.epochs or _epochs(PRETRAINED_PASSES, images, least=PRETRAINED_MIN_EPOCHS),
        batch_size=effort.batch_size or PRETRAINED_BATCH,
        learning_rate=effort.learning_rate or rate_of(width),
    )


def _epochs(passes: int, images: int, *, least: int) -> int:
    return min(max(round(passes / images), least), MAX_EPOCHS)


def rate_of(width: int, *, rate: float = RATE) -> float:
    """Choose the learning rate of weights that know nothing yet."""
    return rate * math.sqrt(RATE_WIDTH / width)


def configuration_of(
    student: Student, *, images: LabelledImages, plan: Plan | None, request: Learning
) -> Configuration:
    """Describe a run by digests of its start and its images, not by paths: a folder may move."""
    network = student.network
    return {
        "software": __version__,
        **(asdict(plan) if plan else {}),
        "loss": request.loss,
        "augment": request.augment,
        "flip": request.flip,
        "seed": request.seed,
        "aim": student.aim,
        "classes": len(network.spec.classes),
        "heads": network.spec.experts[-1].heads,
        "experts": len(network.spec.experts),
        "learnt parameters": sum(one.numel() for one in network.learnable()),
        "images": _digest_of_images(images, student),
        "start": digest_of(network.state_dict().values()),
    }


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Digest weights. Those of a start are the parent's, and an expert's that the seed decides."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _digest_of_images(images: LabelledImages, student: Student) -> str:
    digest = hashlib.sha256(student.preprocessing.model_dump_json().encode())
    digest.update("\n".join(images.classes).encode())
    digest.update(images.labels_N.tobytes())
    digest.update(b"".join(images.pictures.digests()))
    return digest.hexdigest()
