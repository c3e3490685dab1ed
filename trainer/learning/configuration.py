"""Describe a run by everything that decides its weights: equal descriptions are one run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict

from torch import Tensor

from model_store import __version__
from trainer.data.folders import LabelledImages
from trainer.learning.checkpoint import Configuration
from trainer.learning.plan import Plan
from trainer.learning.student import Student
from trainer.request import Learning


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
