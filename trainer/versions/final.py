"""Hold the experts that have learnt, and count the exemplars that a class may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_store.inference.forward import Lineage
from trainer.data.task_data import TaskData
from trainer.learning.student import Student
from trainer.request import Learning
from trainer.tokens.cache import TokenCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The experts that have learnt, folded, and what they see in the images."""

    experts: Lineage
    cache: TokenCache
    exemplars: Mapping[str, Sequence[int]]
    """The training images to remember of each new class, in herding order."""


def quota_of(student: Student, data: TaskData, request: Learning) -> int:
    """Count the exemplars that a class may have."""
    return request.exemplars // (len(student.network.spec.classes) - len(data.retired))
