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
from model_store.precision import Precision
from model_store.records.manifest import Geometry
from model_store.records.sealing import Record
from model_store.spec import ExpertSpec
from model_store.store.cache import cache_folder

Backend = Literal["torch", "onnx"]
Figures = Mapping[str, Mapping[str, float]]
"""Images a second by candidate and by the number of images under way."""
TIE = 0.9
"""Share of the fastest candidate's speed from which two are told apart by the order alone."""
REMEMBERED = "engine.json"

log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of running batches."""

    backend: Backend
    precision: Precision = "fp32"
    packed: bool = False

    @property
    def name(self) -> str:
        weights = ", packed weights" if self.packed else ""
        return f"{self.backend} {self.precision}{weights}"


CANDIDATES = (
    Candidate("onnx"),
    Candidate("onnx", packed=True),
    Candidate("torch"),
    Candidate("onnx", "int8"),
    Candidate("onnx", "int8", packed=True),
    Candidate("torch", "bf16"),
)
"""Sorted by preference: single precision first, then by memory. Of two that are equally fast the
first one is taken, and the first one that is allowed serves until engines are measured."""


class Request(Record):
    """All that a remembered choice depends on. Versions of one shape share a choice."""

    network: Geometry
    experts: tuple[ExpertSpec, ...]
    candidates: tuple[Candidate, ...]
    threads: int
    max_batch: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Measurement(Record):
    """The message to the child process that measures."""

    store: str
    version: int
    digest: str
    """The digest of the version's manifest."""
    request: Request
    excluded: tuple[str, ...] = ()
    """Names of candidates that an earlier child has died of."""
    niceness: int = 0


def fastest(figures: Figures, candidates: Sequence[Candidate]) -> Candidate:
    """Take the first of the candidates whose geometric mean is close to the best: a server has few
    clients at one time and many at another, and each of the loads counts the same. A candidate
    that was not run at all loads had lost before."""
    loads = max(len(one) for one in figures.values())
    scores = {
        name: math.prod(one.values()) ** (1 / loads)
        for name, one in figures.items()
        if len(one) == loads
    }
    enough = TIE * max(scores.values())
    return next(one for one in candidates if scores.get(one.name, 0.0) >= enough)


def table(figures: Figures) -> str:
    """Tell all figures in one line, with a dash for a load that a candidate was not run at."""
    loads = loads_of(figures)
    rows = "; ".join(f"{name} {' / '.join(cells(one, loads))}" for name, one in figures.items())
    return f"images/s with {' / '.join(loads)} images under way: {rows}"


def loads_of(figures: Figures) -> list[str]:
    """List the numbers of images under way, the least first."""
    return sorted({load for one in figures.values() for load in one}, key=int)


def cells(rates: Mapping[str, float], loads: Sequence[str]) -> list[str]:
    """Write the rates of a candidate at each load."""
    return [f"{rates[load]:.3g}" if load in rates else "–" for load in loads]


def remembered(request: Request) -> Candidate | None:
    """Read the choice of an earlier measurement; None where the file is missing or damaged."""
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
