"""Hold the experts that have learnt; name and count the images that pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_store.inference.forward import Lineage
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache
from trainer.learning.student import Student
from trainer.request import Learning

CHOOSING, JUDGING = "choosing exemplars", "judging"
"""The phases after learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The experts that have learnt, folded, and what they see in the images."""

    experts: Lineage
    cache: EmbeddingCache
    exemplars: Mapping[str, Sequence[int]]
    """The training images to remember of each new class, in herding order."""


def herded_classes(student: Student, data: TaskData, request: Learning) -> tuple[str, ...]:
    """List the classes that get new exemplars. A version of the same images keeps the parent's."""
    if student.aim in ("deepening", "adaptation") or not quota_of(student, data, request):
        return ()
    return student.new_classes


def images_to_herd(student: Student, data: TaskData, request: Learning) -> int:
    """Count the images that exemplars are chosen from."""
    names = herded_classes(student, data, request)
    return sum(len(data.for_training.rows_of(name)) for name in names)


def quota_of(student: Student, data: TaskData, request: Learning) -> int:
    """Count the exemplars that a class may have."""
    return request.exemplars // (len(student.network.spec.classes) - len(data.retired))
