"""Take the images of a run with their tokens, and have advice made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model_store.advice.record import Advice
from trainer.advice.advise import NO_TOKENS, AtHand, advise
from trainer.data.folders import LabelledImages
from trainer.data.task_data import TaskData
from trainer.learning.student import Learnt, Student
from trainer.tokens.cache import TokenCache


def advise_on(student: Student, *, data: TaskData, learnt: Learnt, cache: TokenCache) -> Advice:
    """Advise on the version that a run makes. The tokens are in the cache by now."""
    if learnt.tokens_NW is None or learnt.labels_N is None or learnt.real_N is None:
        return NO_TOKENS
    width = student.network.spec.slice_width(0)
    lost = np.unique(learnt.labels_N[~learnt.real_N])
    stands_in_N = np.isin(learnt.labels_N, lost)
    training = _without(data.for_training, lost, data)
    judged = _without(data.judged_by, lost, data)
    known = {kept.entry.class_name: kept.entry.count for kept in data.statistics}
    known |= {name: one.count for name, one in learnt.statistics.items()}
    names = data.for_training.classes
    return advise(
        AtHand(
            learnt=training,
            learnt_NW=cache.tokens(training)[:, :width],
            judged=judged,
            judged_NW=cache.tokens(judged)[:, :width],
            lost_NW=learnt.tokens_NW[stands_in_N, :width],
            lost_N=learnt.labels_N[stands_in_N],
            kept={names[place]: known[names[place]] for place in lost},
        )
    )


def _without(images: LabelledImages, lost: NDArray[np.int64], data: TaskData) -> LabelledImages:
    """Leave out retired classes, and classes that have lost images."""
    retired = [images.classes.index(name) for name in data.retired]
    rows = np.flatnonzero(~np.isin(images.labels_N, [*lost.tolist(), *retired]))
    return images.take(rows.astype(np.int64))
