"""An engine without a network, and a clock that a test sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dne_serve.engines.base import (
    Answer,
    Answers,
    Fetched,
    Floats,
    Model,
    Query,
    ReadShard,
    Resident,
    Steps,
)
from model_store.errors import ShardCorrupt
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest


class FakeModel:
    """A version that answers nothing."""

    def covers(self, other: Model) -> bool:
        return other is self

    def run(self, pixels: Pixels) -> Floats:
        raise NotImplementedError

    def logits(self, passed: Floats, rows: Sequence[int]) -> Floats:
        raise NotImplementedError

    def log_odds(self, passed: Floats, rows: Sequence[int]) -> Floats | None:
        raise NotImplementedError

    def tokens(self, passed: Floats, rows: Sequence[int], *, width: int) -> Floats:
        return passed[list(rows), :width]


class FakeEngine:
    """Loads by remembering. Versions in `broken` cannot be loaded."""

    backend, device, workers, choice = "fake", "cpu", 1, "a fake"

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.kept: list[int] = []
        self.broken: set[int] = set()

    def fetch(self, manifest: Manifest, *, read: ReadShard) -> Fetched:
        if manifest.version in self.broken:
            raise ShardCorrupt("0" * 64, "a test said so")
        return Fetched(manifest=manifest, shards={})

    def load(self, fetched: Fetched) -> Steps[Resident]:
        yield
        self.loaded.append(fetched.manifest.version)
        return Resident.of(fetched.manifest, model=FakeModel())

    def run(self, widest: Resident, queries: Sequence[Query]) -> Sequence[Answers]:
        return [(Answer(logits=np.zeros(len(widest.labels), dtype=np.float32)),) for _ in queries]

    def retain(self, residents: Iterable[Resident]) -> Steps[None]:
        yield
        self.kept = sorted(one.version for one in residents)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
