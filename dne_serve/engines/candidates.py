"""List the engines that can be measured, take the fastest, and remember it for this machine."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from model_store.host.machine import (
    UNREADABLE,
    machine_digest,
    read_remembered,
    remember,
    usable_cores,
)
from model_store.records.manifest import Geometry, spec_of
from model_store.records.quality import Reduced
from model_store.records.sealing import Record
from model_store.spec import ExpertSpec, NetworkSpec, TaskSpec
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


class Request(Record):
    """All that a remembered choice depends on. Versions of one shape share a choice."""

    network: Geometry
    experts: tuple[ExpertSpec, ...]
    candidates: tuple[Candidate, ...]
    reduced: tuple[Reduced, ...]
    """Precisions that the candidates of a backend compute in, instead of single precision."""
    threads: int
    max_batch: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def spec(self) -> NetworkSpec:
        """Describe a network of this shape, with one class a task."""
        tasks = (
            TaskSpec(name=f"{place}", classes=(f"{place}",), expert=expert)
            for place, expert in enumerate(self.experts)
        )
        return spec_of(self.network, tasks=tuple(tasks))


class Measurement(Record):
    """The message to the child process that measures."""

    request: Request
    seconds: float
    try_int8: bool


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


USUAL_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """All `threads` for a lone image, and a worker's share of them for a batch. Threads that wait
    for each other lose much where another program uses the processor; a lone image is answered
    sooner by many threads."""

    threads: int
    workers: int

    @classmethod
    def of(cls, *, threads: int | None, workers: int | None) -> ThreadPlan:
        """Plan with the given numbers, or by the cores that this process may use."""
        all_of_them = threads or usable_cores()
        return cls(threads=all_of_them, workers=workers or min(USUAL_WORKERS, all_of_them))

    @property
    def share(self) -> int:
        return max(1, self.threads // self.workers)


@dataclass(slots=True)
class UnderWay:
    """A count of the passes under way."""

    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Count a pass, and tell whether it has begun alone."""
        with self._lock:
            self._count += 1
            alone = self._count == 1
        try:
            yield alone
        finally:
            with self._lock:
                self._count -= 1
