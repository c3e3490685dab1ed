"""List the engines that can be measured, take the fastest, and remember it for this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from model_store.machine import UNREADABLE, machine_digest, read_remembered, remember
from model_store.records.quality import Reduced
from model_store.store.cache import cache_folder

Backend = Literal["torch", "onnx"]
Figures = Mapping[str, Mapping[str, float]]
"""Images a second by candidate and by the number of images under way."""
TIE = 0.85
"""Share of the fastest candidate's speed from which a few seconds cannot tell two apart."""
REMEMBERED = "engine.json"

log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of running batches."""

    backend: Backend
    packed: bool = False
    workers: int = 1

    @property
    def name(self) -> str:
        if self.backend == "torch":
            return "torch"
        weights = "packed weights, " if self.packed else ""
        return f"onnx, {weights}{self.workers} worker{'s' if self.workers > 1 else ''}"


CANDIDATES = (
    Candidate("torch"),
    Candidate("onnx"),
    Candidate("onnx", workers=2),
    Candidate("onnx", packed=True),
    Candidate("onnx", packed=True, workers=2),
)
"""Sorted by memory."""
PREFERENCE = (CANDIDATES[2], CANDIDATES[4], CANDIDATES[1], CANDIDATES[3], CANDIDATES[0])
"""Sorted by speed in runs of minutes, and by memory where those found no difference (ADR 042): of
two that a few seconds find equally fast, the first one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that the child process needs to know, and all that a remembered choice depends on."""

    spec: dict[str, Any]
    candidates: tuple[Candidate, ...]
    reduced: tuple[Reduced, ...]
    """Precisions that the candidates of a backend compute in, instead of single precision."""
    threads: int
    max_batch: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def fastest(figures: Figures, candidates: Sequence[Candidate]) -> Candidate:
    """Take the preferred one of the candidates whose geometric mean is close to the best: a server
    has few clients at one time and many at another, and each of the loads counts the same. A
    candidate that was not run at all loads had lost before."""
    loads = max(len(one) for one in figures.values())
    scores = {
        name: math.prod(one.values()) ** (1 / loads)
        for name, one in figures.items()
        if len(one) == loads
    }
    enough = TIE * max(scores.values())
    good = (one for one in PREFERENCE if one in candidates)
    return next(one for one in good if scores.get(one.name, 0.0) >= enough)


def table(figures: Figures) -> str:
    """Tell all figures in one line, with a dash for a load that a candidate was not run at."""
    loads = sorted({load for one in figures.values() for load in one}, key=int)
    rows = "; ".join(
        f"{name} {' / '.join(f'{one[load]:.0f}' if load in one else '–' for load in loads)}"
        for name, one in figures.items()
    )
    return f"images/s with {' / '.join(loads)} images under way: {rows}"


def remembered(request: Request) -> Candidate | None:
    """Read the choice of an earlier start; None where the file is missing or damaged."""
    names = {one.name: one for one in request.candidates}
    name = _choices(cache_folder() / REMEMBERED).get(_key(request))
    return names.get(name) if isinstance(name, str) else None


def remember_choice(request: Request, choice: Candidate) -> None:
    path = cache_folder() / REMEMBERED
    remember(path, {**_choices(path), _key(request): choice.name})


def _choices(path: Path) -> dict[str, object]:
    try:
        return dict(read_remembered(path).items())
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        log.warning("%s cannot be used, and engines are measured again: %s", path, error)
        return {}


def _key(request: Request) -> str:
    return f"{machine_digest()} {request.digest}"
