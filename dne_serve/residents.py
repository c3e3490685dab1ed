"""The versions in memory: the served one, and a few others that requests have asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from dne_serve.batcher import Batcher
from dne_serve.engine import Engine, Floats, Resident
from model_store.manifest import Manifest, ShardRef
from model_store.preprocess import Pixels

ImageBatcher = Batcher[Resident, Pixels, Floats]


class ShardReader(Protocol):
    def read_shard(self, ref: ShardRef) -> bytes: ...


class Residents:
    """Loads one version at a time: bytes on the caller's thread, tensors on the engine's.

    Keyed by manifest digest, because a number can mean another version in a store made anew.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batcher: ImageBatcher,
        spare: int,
        admit: Callable[[Manifest], object] | None = None,
    ) -> None:
        """`admit` is asked before any byte of a version is read, and raises to refuse it."""
        self._engine = engine
        self._admit = admit
        self._batcher = batcher
        self._spare = spare
        self._served: Resident | None = None
        self._by_digest: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._table = threading.Lock()  # held for moments: the event loop takes it too
        self._loading = threading.Lock()  # held for as long as a load takes

    @property
    def served(self) -> Resident | None:
        return self._served

    @property
    def count(self) -> int:
        return len(self._by_digest)

    @property
    def manifests(self) -> list[Manifest]:
        with self._table:
            return [one.manifest for one in self._by_digest.values()]

    def find(self, digest: str) -> Resident | None:
        """The version if it is in memory; does not wait for a load under way."""
        with self._table:
            if digest in self._by_digest:
                self._by_digest.move_to_end(digest)
            return self._by_digest.get(digest)

    def find_version(self, version: int) -> Resident | None:
        """By number; the served one first, then the one used last."""
        with self._table:
            candidates = [self._served, *reversed(self._by_digest.values())]
        found = next((one for one in candidates if one and one.version == version), None)
        return found and self.find(found.manifest.digest)

    def load(self, manifest: Manifest, *, shards: ShardReader) -> Resident:
        """The version, loaded if it is not in memory. Blocks; never call it on the event loop."""
        with self._loading:
            resident = self.find(manifest.digest)
            if resident is None:
                if self._admit is not None:
                    self._admit(manifest)
                fetched = self._engine.fetch(manifest, read=shards.read_shard)
                resident = self._batcher.call(lambda: self._engine.load(fetched)).result()
                self._put(resident)
            return resident

    def serve(self, resident: Resident) -> None:
        """From now on requests that name no version are answered by this one."""
        self._served = resident
        with self._loading:
            self._put(resident)

    def clear(self) -> None:
        """Lets go of every version; requests under way hold on to theirs."""
        self._served = None
        with self._loading:
            with self._table:
                self._by_digest.clear()
            self._batcher.call(lambda: self._engine.retain([])).result()

    def _put(self, resident: Resident) -> None:
        """Only while loading, so that no expert is let go of between its fetch and its use."""
        with self._table:
            self._by_digest[resident.manifest.digest] = resident
            self._by_digest.move_to_end(resident.manifest.digest)
            spare = [one for one in self._by_digest.values() if one is not self._served]
            gone = spare[: max(0, len(spare) - self._spare)]
            for one in gone:
                del self._by_digest[one.manifest.digest]
            kept = list(self._by_digest.values())
        if gone:
            self._batcher.call(lambda: self._engine.retain(kept)).result()
