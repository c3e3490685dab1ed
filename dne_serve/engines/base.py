"""Define an engine, which runs batches, and the versions in its memory.

Worker threads of the batcher call an engine. One that says `workers = 1` is called by one thread
only: torch on a CPU slows down once a second thread has used OpenMP. Long work comes in steps,
and a worker answers requests between two of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dne_serve.errors import ModelUnusable
from model_store.codec import decode_doubt
from model_store.inference.doubt import Doubt
from model_store.precision import Asked, Precision, Trial, choose, refuse_unless_it_runs, try_out
from model_store.preprocess import Pixels
from model_store.records.hierarchy import Levels
from model_store.records.manifest import Manifest, ShardRef
from model_store.records.quality import Reduced
from model_store.store.shard import check_shard, expected_tensors

Floats = NDArray[np.float32]
ReadShard = Callable[[ShardRef], bytes]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work in short steps, with its result at the end."""
ExpertPath = tuple[object, ...]
"""The ancestry of an expert: the geometry, and digest and shape of every expert up to it."""


log = logging.getLogger("dne_serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version's manifest and the checked bytes of the shards that are not in memory yet, by
    digest. Loading takes them out."""

    manifest: Manifest
    shards: MutableMapping[str, bytes]
    known: tuple[Any, ...] = ()
    """Experts, or a version, that stay in memory until the version is loaded."""


class Model(Protocol):
    """A version as its engine runs it, in two halves: one pass over the images, which may serve
    several versions, and a little work for each of them."""

    def covers(self, other: Model) -> bool:
        """Return whether a pass of this version has all that `other` needs for its logits."""

    def run(self, pixels: Pixels) -> Any:
        """Run a pass over images [N, S, S, 3]."""

    def logits(self, passed: Any, rows: Sequence[int]) -> Floats:
        """Compute [rows, classes], retired classes too, from a pass of a version that covers this
        one."""

    def log_odds(self, passed: Any, rows: Sequence[int]) -> Floats | None:
        """Compute [rows], the log-odds that an image is of a class that is answered; None for a
        version without a doubt shard."""

    def tokens(self, passed: Any, rows: Sequence[int], *, width: int) -> Floats:
        """Return [rows, width], the first channels of the token."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Resident:
    """A version in memory, ready to answer. Another engine may take the place of `model` while no
    batch is under way."""

    manifest: Manifest
    labels: tuple[str, ...]
    """The classes that are answered, in the order of `run`'s logits."""
    tasks: tuple[str, ...]
    """The task of each label."""
    model: Model
    levels: Levels | None = None
    """The groups above the labels, if there are any."""

    @classmethod
    def of(cls, manifest: Manifest, *, model: Model) -> Resident:
        pairs = [
            (label, task.name)
            for task in manifest.tasks
            for label in manifest.without_retired(task.classes)
        ]
        labels, tasks = zip(*pairs, strict=True)
        groups = manifest.hierarchy
        levels = None if groups is None else Levels(groups, labels)
        return cls(manifest=manifest, labels=labels, tasks=tasks, model=model, levels=levels)

    @property
    def version(self) -> int:
        return self.manifest.version


class Watch(Protocol):
    """Wants to know when an image was computed."""

    def ran(self, arrived_ns: int, began_ns: int, ended_ns: int) -> None:
        """Note when the image was queued, and when its batch began and ended. Called on a worker
        thread, before the answer is there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Query:
    """An image, the version that answers, and versions that answer for comparison."""

    pixels: Pixels
    residents: tuple[Resident, ...]
    wants_token: bool = False
    watch: Watch | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The answer of one version for one image."""

    logits: Floats
    """One for each of the version's labels."""
    log_odds: float | None = None
    """The log-odds that the image is of one of the labels, if the version tells them."""
    token: Floats | None = None
    """The slice of the oldest expert, which is the same in all versions of a lineage, if the query
    wants it."""


Answers = tuple[Answer | None, ...]
"""The answer of each version that was asked; None where another than the first is unusable."""


class Engine(Protocol):
    backend: str
    device: str
    workers: int
    """Threads that may call `run` at a time."""
    choice: str
    """The engine and the reason for it, in words for operators."""

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        """Read and check the shards of experts that are not in memory. An engine may build the
        version here too. Any thread may call this, one at a time."""

    def load(self, fetched: Fetched) -> Steps[Resident]:
        """Build the version and run it once, so that the first request is as fast as the next."""

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers | Exception]:
        """Compute, for each query in order, the answers of its residents. `widest` covers
        all residents of all queries: one pass over the images is enough."""

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        """Free the experts that none of `residents` uses."""


class Precisions:
    """The precision of each version, decided once. A worker thread must not ask first: a decision
    may try a precision out in a child process, which takes seconds on a machine that never did."""

    def __init__(
        self,
        asked: Asked,
        *,
        offered: Sequence[Reduced],
        backend: str,
        try_out: Callable[[Reduced], Trial] = try_out,
    ) -> None:
        """Raise WrongUsage for a precision that was asked for by name and does not run here."""
        refuse_unless_it_runs(asked, offered=offered, backend=backend, try_out=try_out)
        self._asked: Asked = asked
        self._offered = tuple(offered)
        self._try_out = try_out
        self._chosen: dict[str, Precision] = {}

    def of(self, manifest: Manifest) -> Precision:
        if manifest.digest not in self._chosen:
            choice = choose(
                manifest.metrics.agreement,
                asked=self._asked,
                offered=self._offered,
                try_out=self._try_out,
            )
            log.info("version %d is computed in %s", manifest.version, choice.precision)
            if self._asked != "auto":
                for reason in choice.refused:
                    log.warning("version %d: %s", manifest.version, reason)
            self._chosen[manifest.digest] = choice.precision
        return self._chosen[manifest.digest]


def finish(steps: Steps[Result]) -> Result:
    """Run all steps, and give the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def paths_of(manifest: Manifest) -> list[ExpertPath]:
    """Give the ancestry of every expert. A digest alone does not tell which experts it reads."""
    path: ExpertPath = (manifest.spec.until(0),)
    paths = []
    for ref, expert in zip(manifest.experts, manifest.spec.experts, strict=True):
        path = (*path, (ref.sha256, expert))
        paths.append(path)
    return paths


def read_checked(
    manifest: Manifest, needed: Iterable[ShardRef], read: ReadShard
) -> MutableMapping[str, bytes]:
    """Read these shards and apply every check that does not need torch; by digest."""
    shards = {}
    for ref in needed:
        shards[ref.sha256] = data = read(ref)
        check_shard(ref, data, expected=expected_tensors(manifest, ref))
    return shards


def take_doubt(manifest: Manifest, shards: MutableMapping[str, bytes]) -> Doubt | None:
    """Take the doubt of a version out of its checked `shards`; None for a version without one."""
    if manifest.doubt is None:
        return None
    return decode_doubt(shards.pop(manifest.doubt.sha256), places=manifest.places)


def joined(one: Resident, other: Resident) -> Resident | None:
    """Find the one of two versions whose pass answers for both; None if neither does."""
    if one is other:
        return one
    if one.manifest.preprocessing != other.manifest.preprocessing:
        return None
    if one.model.covers(other.model):
        return one
    return other if other.model.covers(one.model) else None


def answer_all(widest: Resident, queries: Sequence[Query]) -> list[Answers | Exception]:
    """Answer all queries by one pass. Logits that are not finite fail their own query only."""
    pixels = np.stack([query.pixels for query in queries])
    passed = widest.model.run(pixels)
    rows: dict[Resident, list[int]] = {}
    for row, query in enumerate(queries):
        for resident in query.residents:
            rows.setdefault(resident, []).append(row)
    found: dict[tuple[Resident, int], Answer | None] = {}
    for resident, chosen in rows.items():
        answers = _rows(resident, passed, chosen)
        found |= {(resident, row): one for row, one in zip(chosen, answers, strict=True)}
    wanted = [row for row, query in enumerate(queries) if query.wants_token]
    width = widest.manifest.spec.doubt_width
    kept = widest.model.tokens(passed, wanted, width=width) if wanted else ()
    tokens = dict(zip(wanted, kept, strict=True))
    return [
        _answers(query, [found[one, row] for one in query.residents], token=tokens.get(row))
        for row, query in enumerate(queries)
    ]


def _rows(resident: Resident, passed: Any, rows: Sequence[int]) -> list[Answer | None]:
    logits = resident.model.logits(passed, rows)
    odds = resident.model.log_odds(passed, rows)
    judged = logits if odds is None else np.column_stack([logits, odds])
    finite = [bool(np.isfinite(row).all()) for row in judged]
    if resident.manifest.retired:
        logits = logits[:, list(resident.manifest.places)]
    return [
        Answer(logits=row, log_odds=None if odds is None else float(odds[place])) if fine else None
        for place, (row, fine) in enumerate(zip(logits, finite, strict=True))
    ]


def _answers(
    query: Query, answers: Sequence[Answer | None], *, token: Floats | None
) -> Answers | Exception:
    own, *others = answers
    if own is None:
        version = query.residents[0].version
        return ModelUnusable(f"version {version} gives logits that are not finite")
    return (own if token is None else replace(own, token=token), *others)


def warmed(resident: Resident) -> Resident:
    """Run a version once, and raise ModelUnusable if its logits are not finite."""
    size = resident.manifest.preprocessing.image_size
    pixels = np.zeros((size, size, 3), dtype=np.uint8)
    (answer,) = answer_all(resident, [Query(pixels=pixels, residents=(resident,))])
    if isinstance(answer, Exception):
        raise answer
    return resident
