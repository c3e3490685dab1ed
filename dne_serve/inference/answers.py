"""Turn logits into labels, scores and JSON. Knows nothing of images and HTTP.

The event loop builds small answers, and one thread builds large answers piece by piece, so that
the event loop gets its turn in between. Only numpy computes here: a second thread that uses
torch's OpenMP would slow the engine down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from dne_serve.engines.base import Resident
from dne_serve.engines.scored import Scored
from dne_serve.errors import QueueFull

MAX_TOP_K = 1000
"""Classes that a client may have listed for each image. A version may have more."""
SCORE_WORK = 50
"""Listing a class takes as long as computing this many probabilities: 0.6 µs and 12 ns."""
_LARGE_WORK = 50_000
"""About 1 ms, ten times as long as a trip to a thread."""
MAX_LARGE_ANSWERS = 64
"""Large answers that may wait for the thread. Each holds its logits: 5 MB for 64 × 20,000."""
_PIECE_VALUES = 4096
"""Values written to JSON without a pause for the event loop: about 1 ms."""
FEW = 8
"""Sort all values if there are fewer than this many times the wanted ones. A full sort of 20,000
values takes ten times as long as a partition."""

Built = TypeVar("Built")


class Listed(TypedDict):
    """A class that an answer names."""

    label: str
    score: float


Identify = Callable[[int, Resident, Scored, Sequence[Listed]], str]
"""Called with the place of an image in its request, the version, its scores, and the classes that
the answer names, the likeliest first."""


class AnswerBuilder:
    """Builder of answers that keeps long work off the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "answer")
        self._waiting = 0  # touched on the event loop only

    async def build(self, make: Callable[[], Built], *, work: int) -> Built:
        """Call `make` here or, for more `work` than _LARGE_WORK, in the thread."""
        if work <= _LARGE_WORK:
            return make()
        if self._waiting >= MAX_LARGE_ANSWERS:
            raise QueueFull(f"{self._waiting} large answers are being built; try again soon")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, make)
        finally:
            self._waiting -= 1

    def stop(self) -> None:
        self._thread.shutdown()


def work_of(images: int, *, classes: int, listed: int) -> int:
    """Estimate the cost of an answer, in computed probabilities. `listed`: classes listed for each
    image."""
    return images * (classes + SCORE_WORK * min(listed, classes))


def prediction_json(
    resident: Resident,
    *,
    canary: bool,
    filenames: Sequence[str | None],
    scored: Sequence[Scored],
    top_k: int,
    identify: Identify | None = None,
    threshold: float | None = None,
    why: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> bytes:
    """Write a `PredictAnswer` without building its pydantic models: a model for each score would
    take most of the time. A test compares the JSON with the models. `identify` gives a prediction
    its id, if pictures are collected. `threshold` stands in for the version's own; `why` has the
    nearest kept images of each image."""
    head = to_json({"version": resident.version, "canary": canary})
    predictions = []
    for place, (name, image) in enumerate(zip(filenames, scored, strict=True)):
        made = _prediction(resident, filename=name, scored=image, top_k=top_k, threshold=threshold)
        if identify is not None:
            made["id"] = identify(place, resident, image, made["top"])
        if why is not None:
            made["why"] = why[place]
        predictions.append(to_json(made, inf_nan_mode="null"))
    return b"".join((head[:-1], b',"predictions":[', b",".join(predictions), b"]}"))


def list_json(values: Sequence[Any]) -> bytes:
    """Write a list of numbers or texts in pieces."""
    pieces = (
        to_json(values[start : start + _PIECE_VALUES], inf_nan_mode="null")[1:-1]
        for start in range(0, len(values), _PIECE_VALUES)
    )
    return b"".join((b"[", b",".join(pieces), b"]"))


def best_of(values: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Find the indexes of the `count` highest values, the highest first; of equal values, the one
    that stands first."""
    lowered = -values
    if len(values) < FEW * count:
        return np.argsort(lowered, kind="stable")[:count]
    bound = np.partition(lowered, count - 1)[count - 1]
    candidates = np.flatnonzero(lowered <= bound)
    return candidates[np.argsort(lowered[candidates], kind="stable")[:count]]


def _prediction(
    resident: Resident,
    *,
    filename: str | None,
    scored: Scored,
    top_k: int,
    threshold: float | None,
) -> dict[str, Any]:
    """Name the classes of one image, with the fields of `Prediction` in their order."""
    scores = scored.probabilities
    order = best_of(scores, top_k)
    indexes: list[int] = order.tolist()
    values: list[float] = scores[order].tolist()
    labels = resident.labels
    label, score, level = labels[indexes[0]], values[0], 0
    is_unknown = scored.is_unknown
    if threshold is not None and scored.unknown_score is not None:
        is_unknown = scored.unknown_score > threshold
    levels, higher = resident.levels, None
    if levels is not None and not is_unknown and score < levels.least:
        higher = levels.higher(scores.tolist())  # a group answers instead of a class in doubt
    if higher is not None:
        label, score, level = higher.name, higher.score, higher.level
    return {
        "filename": filename,
        "label": label,
        "score": score,
        "level": level,
        "task": resident.tasks[indexes[0]],
        "unknown": is_unknown,
        "unknown_score": scored.unknown_score,
        "top": [
            {"label": labels[index], "score": score}
            for index, score in zip(indexes, values, strict=True)
        ],
    }
