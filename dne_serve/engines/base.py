"""Define an engine, which runs batches, and the versions in its memory.

Worker threads of the batcher call an engine. One that says `workers = 1` is called by one thread
only: torch on a CPU slows down once a second thread has used OpenMP. Long work comes in steps,
and a worker answers requests between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dne_serve.errors import ModelUnusable
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest, ShardRef
from model_store.store.shard import check_shard, expected_tensors

Floats = NDArray[np.float32]
ReadShard = Callable[[ShardRef], bytes]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work in short steps, with its result at the end."""
ExpertPath = tuple[object, ...]
"""The geometry, and the digest and shape of every expert up to the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version's manifest and the checked bytes of the shards that are not in memory yet, by
    digest. Loading takes them out."""

    manifest: Manifest
    shards: MutableMapping[str, bytes]
    known: tuple[Any, ...] = ()
    """What is in memory already, kept there until the version is loaded."""


class Model(Protocol):
    """A version as its engine runs it, in two halves: one pass over the images, which may serve
    several versions, and a little work for each of them."""

    def covers(self, other: Model) -> bool:
        """Whether a pass of this version has what `other` needs for its logits."""

    def run(self, pixels: Pixels) -> Any:
        """One pass over images [N, S, S, 3]."""

    def logits(self, passed: Any, rows: Sequence[int]) -> Floats:
        """[rows, classes], those of retired classes too, from a pass of a version that covers
        this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A version in memory, ready to answer."""

    manifest: Manifest
    labels: tuple[str, ...]
    """The classes that are answered, in the order of `run`'s logits."""
    tasks: tuple[str, ...]
    """The task of each label."""
    model: Model

    @classmethod
    def of(cls, manifest: Manifest, *, model: Model) -> Resident:
        pairs = [
            (label, task.name)
            for task in manifest.tasks
            for label in manifest.without_retired(task.classes)
        ]
        labels, tasks = zip(*pairs, strict=True)
        return cls(manifest=manifest, labels=labels, tasks=tasks, model=model)

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Query:
    """An image, the version that answers, and others that are asked what they would have said."""

    pixels: Pixels
    residents: tuple[Resident, ...]


Answers = tuple[Floats | None, ...]
"""The logits of each version that was asked; None where another than the first is unusable."""


class Engine(Protocol):
    backend: str
    device: str
    workers: int
    """Threads that may call `run` at a time."""
    choice: str
    """The engine and the reason for it, in words for operators."""

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        """Reads and checks what `load` will need: the shards of experts it does not hold. An
        engine whose passes do not suffer from it builds the version here. One at a time."""

    def load(self, fetched: Fetched) -> Steps[Resident]:
        """Builds the version and runs it once, so that the first request is as fast as the next."""

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        """For each query, in order, one logit for each of a resident's labels. `widest` covers all
        residents of all queries: one pass over the images is enough."""

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        """Lets go of the experts that none of `residents` uses."""


def finish(steps: Steps[Result]) -> Result:
    """All steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def paths_of(manifest: Manifest) -> list[ExpertPath]:
    """Of every expert. By its ancestors too: a digest alone does not say whom it reads."""
    path: ExpertPath = (manifest.spec.until(0),)
    paths = []
    for task, spec in zip(manifest.tasks, manifest.spec.tasks, strict=True):
        path = (*path, (task.expert.sha256, spec.expert))
        paths.append(path)
    return paths


def read_checked(
    manifest: Manifest, needed: Iterable[ShardRef], read: ReadShard
) -> MutableMapping[str, bytes]:
    """The bytes of these shards by digest, after every check that does not need torch."""
    shards = {}
    for ref in needed:
        shards[ref.sha256] = data = read(ref)
        check_shard(ref, data, expected=expected_tensors(manifest, ref))
    return shards


def joined(one: Resident, other: Resident) -> Resident | None:
    """The one of two versions whose pass answers for both; None where there is none."""
    if one is other:
        return one
    if one.manifest.preprocessing != other.manifest.preprocessing:
        return None
    if one.model.covers(other.model):
        return one
    return other if other.model.covers(one.model) else None


def answer_all(widest: Resident, queries: Sequence[Query]) -> list[Answers | Exception]:
    """A version that gives logits that are not finite fails its own images, and no others."""
    pixels = np.stack([query.pixels for query in queries])
    passed = widest.model.run(pixels)
    rows: dict[Resident, list[int]] = {}
    for row, query in enumerate(queries):
        for resident in query.residents:
            rows.setdefault(resident, []).append(row)
    found: dict[tuple[Resident, int], Floats | None] = {}
    for resident, chosen in rows.items():
        logits = _logits(resident, passed, chosen)
        found |= {(resident, row): one for row, one in zip(chosen, logits, strict=True)}
    return [
        _answers(query, [found[one, row] for one in query.residents])
        for row, query in enumerate(queries)
    ]


def _logits(resident: Resident, passed: Any, rows: Sequence[int]) -> list[Floats | None]:
    logits = resident.model.logits(passed, rows)
    finite = [bool(np.isfinite(row).all()) for row in logits]
    if resident.manifest.retired:
        logits = logits[:, list(resident.manifest.places)]
    return [row if fine else None for row, fine in zip(logits, finite, strict=True)]


def _answers(query: Query, logits: Sequence[Floats | None]) -> Answers | Exception:
    if logits[0] is None:
        version = query.residents[0].version
        return ModelUnusable(f"version {version} gives logits that are not finite")
    return tuple(logits)


def warmed(resident: Resident) -> Resident:
    """The version after one pass, which shows its logits to be finite."""
    size = resident.manifest.preprocessing.image_size
    pixels = np.zeros((size, size, 3), dtype=np.uint8)
    (answer,) = answer_all(resident, [Query(pixels=pixels, residents=(resident,))])
    if isinstance(answer, Exception):
        raise answer
    return resident
