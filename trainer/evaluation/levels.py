"""Measure answers above the classes, as a server gives them where a class is in doubt."""

from __future__ import annotations

from typing import Any

import numpy as np

from model_store.records.hierarchy import Hierarchy, Levels
from trainer.evaluation.judged import Judged


def measure_levels(
    judged: Judged, hierarchy: Hierarchy | None, *, temperature: float
) -> dict[str, Any] | None:
    """Count the images that a group answers, and how many answers are right at any level.

    Return None without groups or without images.
    """
    if hierarchy is None or not len(judged.labels_N):
        return None
    levels = Levels(hierarchy, judged.classes)
    higher = right_higher = right = 0
    for logits_C, label in zip(judged.logits_NC, judged.labels_N.tolist(), strict=True):
        scaled_C = logits_C.astype(np.float64) / temperature
        weights_C = np.exp(scaled_C - scaled_C.max())
        found = levels.higher((weights_C / weights_C.sum()).tolist())
        if found is None:
            right += int(logits_C.argmax() == label)
            continue
        fits = found.name in hierarchy.above(judged.classes[label])
        higher, right_higher, right = higher + 1, right_higher + fits, right + fits
    images = len(judged.labels_N)
    return {
        "answered_by_groups": higher / images,
        "right_of_these": right_higher / higher if higher else None,
        "right_at_any_level": right / images,
    }
