"""One engine, one version, some images: what a batch of a lone version is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dne_serve.engines.base import Engine, Floats, Query, Resident, finish
from model_store.preprocess import Pixels
from model_store.records.manifest import Manifest, ShardRef
from model_store.store.store import Store


def load(engine: Engine, store: Store, manifest: Manifest) -> Resident:
    return finish(engine.load(engine.fetch(manifest, read=store.read_shard)))


class Reads:
    """Reads shards of a store, and knows which."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.digests: set[str] = set()

    def __call__(self, ref: ShardRef) -> bytes:
        self.digests.add(ref.sha256)
        return self._store.read_shard(ref)


def ask(engine: Engine, resident: Resident, pixels: Sequence[Pixels]) -> Floats:
    """The logits, a row an image."""
    queries = [Query(pixels=one, residents=(resident,)) for one in pixels]
    rows = []
    for answer in engine.run(resident, queries):
        if isinstance(answer, Exception):
            raise answer
        (own,) = answer
        assert own is not None
        rows.append(own.logits)
    return np.stack(rows)


def noise(count: int, *, size: int = 8) -> list[Pixels]:
    shape = (size, size, 3)
    return [np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8) for i in range(count)]
