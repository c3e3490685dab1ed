"""Choose the held-out images that a report shows: wrong answers, and answers that changed."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from model_store.records.quality import MAX_SHOWN, JudgedImage
from trainer.evaluation.judged import Judged

MOST_WORSE = 12
"""Images that the parent had right and this version has wrong."""
MOST_BETTER = 6
"""Images that this version has right and the parent had wrong."""


def choose_shown(
    judged: Judged, parent: Judged | None, *, older: Collection[str], temperature: float
) -> tuple[JudgedImage, ...]:
    """List images by their class and number, so that no pixel is copied: the most confident ones
    of those that got worse, of those that got better, and then of all other wrong answers."""
    images = _all_told(judged, parent, older=older, temperature=temperature)
    images.sort(key=lambda one: -one.confidence)
    worse = [one for one in images if one.before == one.class_name != one.answer]
    better = [one for one in images if one.answer == one.class_name]
    first = [*worse[:MOST_WORSE], *better[:MOST_BETTER]]
    rest = [one for one in images if one.answer != one.class_name and one not in first]
    return (*first, *rest[: MAX_SHOWN - len(first)])


def _all_told(
    judged: Judged, parent: Judged | None, *, older: Collection[str], temperature: float
) -> list[JudgedImage]:
    """Describe every image with a wrong answer, or with another one than the parent's."""
    if not len(judged.labels_N):
        return []
    classes, known = judged.classes, set(older)
    confidence_N = judged.confidence_N(temperature)
    answer_N = judged.logits_NC.argmax(axis=1)
    before_N = None if parent is None else parent.logits_NC.argmax(axis=1)
    seen = np.zeros(len(classes), dtype=np.int64)
    found = []
    for row, label in enumerate(judged.labels_N.tolist()):
        image, name = int(seen[label]), classes[label]
        seen[label] += 1
        before = classes[before_N[row]] if before_N is not None and name in known else None
        answer = classes[answer_N[row]]
        if answer == name and before in (None, name):
            continue
        # A probability may be more than 1 by rounding.
        confidence = min(1.0, float(confidence_N[row]))
        found.append(
            JudgedImage(
                class_name=name, image=image, answer=answer, before=before, confidence=confidence
            )
        )
    return found
