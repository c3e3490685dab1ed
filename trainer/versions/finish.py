"""Fold the experts that have learnt, and choose exemplars of the new classes by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from model_store.inference.forward import Lineage
from trainer.data.exemplars import herding_order
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache
from trainer.learning.student import Learnt, Student
from trainer.learning.token_reading import cache_of
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
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


def _herded_classes(student: Student, data: TaskData, request: Learning) -> tuple[str, ...]:
    """List the classes that get new exemplars. A version of the same images keeps the parent's."""
    if student.aim in ("deepening", "adaptation") or not quota_of(student, data, request):
        return ()
    return student.new_classes


def images_to_herd(student: Student, data: TaskData, request: Learning) -> int:
    """Count the images that exemplars are chosen from."""
    names = _herded_classes(student, data, request)
    return sum(len(data.for_training.rows_of(name)) for name in names)


def quota_of(student: Student, data: TaskData, request: Learning) -> int:
    """Count the exemplars that a class may have."""
    return request.exemplars // (len(student.network.spec.classes) - len(data.retired))


def finish(
    student: Student,
    *,
    data: TaskData,
    request: Learning,
    learnt: Learnt,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Final:
    experts = student.lineage()
    cache = learnt.cache or cache_of(student, experts, folder=request.tokens)
    choose = partial(
        herded,
        _herded_classes(student, data, request),
        data=data,
        cache=cache,
        quota=quota_of(student, data, request),
        ranks=ranks,
    )
    to_read = 0 if learnt.cache else images_to_herd(student, data, request)
    if not to_read:
        return Final(experts=experts, cache=cache, exemplars=choose())
    with progress.phase(CHOOSING, total=to_read) as phase:
        exemplars = choose(advance=phase.advance)
    return Final(experts=experts, cache=cache, exemplars=exemplars)


def herded(
    names: Sequence[str],
    *,
    data: TaskData,
    cache: EmbeddingCache,
    quota: int,
    ranks: Ranks = ALONE,
    advance: Callable[[int], None] | None = None,
) -> dict[str, list[int]]:
    """Choose exemplars on clean images, in herding order. The ranks take classes in turn.

    A class is herded by one rank that has all its images, so the memory does not depend on ranks.
    """
    pool = data.for_training
    mine: dict[str, list[int]] = {}
    for name in names[ranks.rank :: ranks.count]:
        rows = pool.rows_of(name)
        tokens_NW = cache.embeddings(pool.take(rows), advance=advance)
        mine[name] = rows[herding_order(tokens_NW, count=quota)].tolist()
    merged_rows: dict[str, list[int]] = {}
    for one in ranks.gathered(json.dumps(mine).encode()):
        merged_rows |= json.loads(one)
    return {name: merged_rows[name] for name in names}
