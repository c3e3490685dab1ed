"""Adapt the first expert of a lineage, and publish it as a version of the same classes."""

from __future__ import annotations

from model_store.errors import WrongUsage
from model_store.records.manifest import Manifest
from trainer.base import Base
from trainer.data.task_data import TaskData
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import Learning
from trainer.start.make_student import make_adapting
from trainer.versions.one_version import announced
from trainer.versions.outcome import Outcome


def adapt_with(
    base: Base,
    *,
    data: TaskData,
    request: Learning,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Adapt the first expert to all images at hand, which are labelled among the base's classes."""
    assert base.parent is not None
    refuse_younger_experts(base.parent)

    with announced(base, request=request, progress=progress, ranks=ranks) as run:
        return run.learn(make_adapting(base, request=request), data)


def can_adapt(manifest: Manifest) -> bool:
    """Tell whether the first expert may change: no younger expert reads it, and it came from a file
    as it is."""
    return (
        manifest.spec.is_pretrained
        and len(manifest.experts) == 1
        and not manifest.tasks[0].training.get("unfrozen_blocks")
    )


def refuse_younger_experts(parent: Manifest) -> None:
    if len(parent.experts) > 1:
        raise WrongUsage(
            f"version {parent.version} has an expert that reads the first one, so the first one "
            "cannot change any more; `dne-train deepen --kind dense` adds another expert"
        )
