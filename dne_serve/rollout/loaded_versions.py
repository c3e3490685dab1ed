"""Hold the versions in memory: the served one, its canary and shadow, and some that were asked for.

Versions share their experts, so each costs only the shards that no other has. A version that is not
needed leaves after a while, when there are too many, or when memory is short.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic
from weakref import WeakKeyDictionary, WeakSet

from dne_serve.engines.base import (
    Answers,
    Engine,
    Query,
    ReadShard,
    Resident,
    Result,
    Steps,
)
from dne_serve.engines.batcher import Batcher, Flow, Ticket
from dne_serve.errors import NoRoom
from dne_serve.rollout.memory import give_back
from model_store.records.manifest import Manifest, total_bytes
from model_store.store.store import Store

ImageBatcher = Batcher[Resident, Query, Answers]
ImageTicket = Ticket[Resident, Query, Answers]
ImageFlow = Flow[Resident, Query, Answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLimits:
    """Limits on the versions in memory that are not needed."""

    spare: int = 4
    max_bytes: int | None = None
    """Limit on the experts and classifiers of all residents."""
    idle_s: float = 600.0


@dataclass(slots=True)
class _Entry:
    resident: Resident
    used_at: float


@dataclass(slots=True)
class _Table:
    """The residents by manifest digest, least recently used first. A number could mean another
    version in a store made anew."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)

    def use(self, digest: str, *, now: float) -> Resident | None:
        entry = self.entries.get(digest)
        if entry is None:
            return None
        entry.used_at = now
        self.entries.move_to_end(digest)
        return entry.resident

    def put(self, resident: Resident, *, now: float) -> None:
        self.entries[resident.manifest.digest] = _Entry(resident, now)
        self.entries.move_to_end(resident.manifest.digest)

    def residents(self) -> list[Resident]:
        return [entry.resident for entry in self.entries.values()]

    def leave(
        self,
        *,
        needed: Iterable[Resident],
        limits: LoadedLimits,
        now: float,
        coming: Sequence[Manifest] = (),
        others: Sequence[Manifest] = (),
    ) -> bool:
        """Remove versions that the limits do not allow beside those coming and those of other
        models, least recently used first."""
        stay = {resident.manifest.digest for resident in needed}
        spare = [digest for digest in self.entries if digest not in stay]
        gone = False
        for place, digest in enumerate(spare):
            idle = now - self.entries[digest].used_at > limits.idle_s
            too_many = len(spare) - place + len(coming) > limits.spare
            if idle or too_many or self._too_large(limits, (*coming, *others)):
                del self.entries[digest]
                gone = True
        return gone

    def _too_large(self, limits: LoadedLimits, beside: Sequence[Manifest]) -> bool:
        if limits.max_bytes is None:
            return False
        own = (resident.manifest for resident in self.residents())
        return bytes_of([*own, *beside]) > limits.max_bytes


class EngineRoom:
    """The engine and all versions in its memory, whichever model they are of. They share experts,
    and are loaded one at a time: bytes on the caller's thread, tensors on a worker of the batcher,
    in steps between its batches."""

    def __init__(self, engine: Engine, *, batcher: ImageBatcher) -> None:
        self.engine = engine
        self.loading = threading.Lock()
        """Held for as long as a load takes."""
        self._batcher = batcher
        self._reads: WeakKeyDictionary[Resident, ReadShard] = WeakKeyDictionary()
        self._holders: WeakSet[LoadedVersions] = WeakSet()

    @property
    def holders(self) -> list[LoadedVersions]:
        """List the versions of each model."""
        return list(self._holders)

    @property
    def manifests(self) -> list[Manifest]:
        return [manifest for holder in self.holders for manifest in holder.manifests]

    @property
    def bytes(self) -> int:
        """Count the bytes of experts and classifiers in memory, shared ones once."""
        return bytes_of(self.manifests)

    def join(self, holder: LoadedVersions) -> None:
        """Count the versions of a model too."""
        self._holders.add(holder)

    def leave(self, holder: LoadedVersions) -> None:
        """Count the versions of a model no more."""
        self._holders.discard(holder)

    def build(self, manifest: Manifest, *, shards: Store) -> Resident:
        """Load a version. Call with `loading` held, as for `free`."""
        fetched = self.engine.fetch(manifest, read=shards.read_shard)
        resident = self._in_steps(self.engine.load(fetched))
        self._reads[resident] = shards.read_shard
        return resident

    def free(self) -> None:
        """Free the experts that no version uses any more."""
        kept = [resident for holder in self.holders for resident in holder.residents]
        self._in_steps(self.engine.retain(kept))

    def switch(self, engine: Engine) -> None:
        """Compute all versions by another engine, from between two batches on. Blocks for as long
        as loading them takes; the old engine answers meanwhile, and stays if this fails."""
        with self.loading:
            made = []
            # Also those that only a request under way has kept.
            for resident, read in list(self._reads.items()):
                fetched = engine.fetch(resident.manifest, read=read)
                made.append((resident, self._in_steps(engine.load(fetched)).model))

            def swap() -> None:
                for resident, model in made:
                    resident.model = model
                self.engine = engine

            self._batcher.call(swap, workers=engine.workers).result()
        give_back()

    def _in_steps(self, steps: Steps[Result]) -> Result:
        """Run the steps on a worker, which answers batches between two of them."""
        while True:
            done = self._batcher.call(lambda: _step(steps)).result()
            if done is not None:
                return done.result


class LoadedVersions:
    """The versions of one model in memory."""

    def __init__(
        self,
        room: EngineRoom,
        *,
        limits: LoadedLimits,
        admit: Callable[[Manifest], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `admit` before any byte of a version is read. It raises to refuse the version."""
        self._room = room
        self._admit = admit
        self._limits = limits
        self._clock = clock
        self._served: Resident | None = None
        self._beside: tuple[Resident, ...] = ()
        self._held: tuple[Resident, ...] = ()
        self._residents = _Table()
        self._left = False  # something has left, and requests under way may have kept it since
        self._table = threading.Lock()  # held for moments: the event loop takes it too
        room.join(self)

    @property
    def served(self) -> Resident | None:
        return self._served

    @property
    def count(self) -> int:
        return len(self._residents.entries)

    @property
    def residents(self) -> list[Resident]:
        with self._table:
            return self._residents.residents()

    @property
    def manifests(self) -> list[Manifest]:
        return [resident.manifest for resident in self.residents]

    def find(self, digest: str) -> Resident | None:
        """Return the version if it is in memory, without waiting for a load under way."""
        with self._table:
            return self._residents.use(digest, now=self._clock())

    def find_version(self, version: int) -> Resident | None:
        """Return a version by its number: the served one first, then the one used last."""
        with self._table:
            loaded = [self._served, *reversed(self._residents.residents())]
        resident = next((held for held in loaded if held and held.version == version), None)
        return resident and self.find(resident.manifest.digest)

    def load(self, manifest: Manifest, *, shards: Store, needed: bool = False) -> Resident:
        """Return the version, loaded if it is not in memory. Blocks; never call it on the event
        loop. Raise NoRoom if it does not fit beside the versions that stay. A version that is
        `needed` is loaded all the same, and others leave."""
        with self._room.loading:
            resident = self.find(manifest.digest)
            if resident is None:
                if self._admit is not None:
                    self._admit(manifest)
                if not needed:
                    self._refuse_without_room(manifest)
                self._sweep(coming=[manifest])  # others leave before it takes memory
                resident = self._room.build(manifest, shards=shards)
                self._put(resident)
            return resident

    def serve(self, resident: Resident) -> None:
        """Answer requests that name no version by this one."""
        self._served = resident
        if self.find(resident.manifest.digest) is resident:
            return  # without waiting for a load under way
        with self._room.loading:
            self._put(resident)

    def clear(self) -> None:
        """Let go of every version. Requests under way keep theirs."""
        self._served = None  # at once, also during a load
        with self._room.loading:
            self.drop()

    def drop(self) -> None:
        """Let go of every version. Call while nothing is loaded."""
        self._served, self._beside, self._held = None, (), ()
        with self._table:
            self._residents.entries.clear()
        self._room.free()

    def stand_beside(self, residents: Iterable[Resident]) -> None:
        """Keep these as the served one is kept, until others take their place."""
        self._beside = tuple(residents)

    def hold(self, residents: Iterable[Resident]) -> None:
        """Keep these, which are about to be served, until others take their place."""
        self._held = tuple(residents)

    def sweep(self) -> None:
        """Let go of versions that were idle for a while. Blocks."""
        if self._room.loading.acquire(blocking=False):  # a load under way sweeps by itself
            try:
                self._sweep()
            finally:
                self._room.loading.release()

    def _put(self, resident: Resident) -> None:
        """Add a version. Call while nothing else is loaded: no expert may leave between fetch and
        use."""
        with self._table:
            self._residents.put(resident, now=self._clock())
        self._sweep()

    def _sweep(self, *, coming: Sequence[Manifest] = ()) -> None:
        others = self._others()
        with self._table:
            left = self._residents.leave(
                needed=self.needed,
                limits=self._limits,
                now=self._clock(),
                coming=coming,
                others=others,
            )
        if left or self._left:
            self._room.free()
            give_back()
        self._left = left

    def _others(self) -> list[Manifest]:
        """List the versions of other models, where bytes are limited."""
        if self._limits.max_bytes is None:
            return []
        others = (holder for holder in self._room.holders if holder is not self)
        return [manifest for holder in others for manifest in holder.manifests]

    @property
    def needed(self) -> list[Resident]:
        """List the versions that stay whatever the limits say."""
        return [*([self._served] if self._served else []), *self._beside, *self._held]

    def _refuse_without_room(self, manifest: Manifest) -> None:
        limit = self._limits.max_bytes
        if limit is None:
            return
        needed = (one for holder in self._room.holders for one in holder.needed)
        stay = [resident.manifest for resident in needed]
        wanted = bytes_of([*stay, manifest])
        if wanted > limit:
            raise NoRoom(
                f"version {manifest.version} does not fit: beside what is served it would take "
                f"{wanted} bytes of the {limit} that are allowed"
            )


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    result: Result


def _step(steps: Steps[Result]) -> _Done[Result] | None:
    try:
        next(steps)
    except StopIteration as end:
        return _Done(end.value)
    return None


def bytes_of(manifests: Iterable[Manifest]) -> int:
    """Count the bytes of experts and classifiers, shared ones once."""
    return total_bytes(tuple(ref for manifest in manifests for ref in manifest.model_shards))
