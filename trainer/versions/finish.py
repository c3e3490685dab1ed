"""Fold the experts that have learnt, and choose exemplars of the new classes by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from trainer.data.exemplars import herding_order
from trainer.data.task_data import TaskData
from trainer.embeddings.cache import EmbeddingCache
from trainer.learning.student import Learnt, Student
from trainer.learning.token_reading import cache_of
from trainer.progress import Progress
from trainer.ranks.ranks import ALONE, Ranks
from trainer.request import Learning
from trainer.versions.final import CHOOSING, Final, herded_classes, images_to_herd, quota_of


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
        herded_classes(student, data, request),
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
