"""Several users of one store, advanced one object operation at a time, in any order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

from model_store.backends.base import Entry, Objects
from model_store.errors import StoreError
from model_store.layout import (
    FORGOTTEN,
    deleted_name,
    forgotten_of,
    shard_name,
    version_name,
    version_of,
)
from model_store.records.manifest import decode
from model_store.records.tombstone import FORGETTABLE
from tests.model_store.backends import ClockedObjects


class Killed(BaseException):
    """Ends an actor where it stands, as kill -9 would: nothing it does afterwards has effect."""


class JudgedObjects(ClockedObjects):
    """Notes every moment at which a version names a shard that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, dict[str, bool]] = {}
        """By the name of a manifest: its shards, and whether they may be forgotten."""
        self.missing: list[str] = []
        self.swept = 0

    def create(self, name: str, data: bytes) -> bool:
        made = super().create(name, data)
        version = version_of(name)
        # Under the number of a deleted version it is none: its writer will notice.
        if made and version is not None and deleted_name(version) not in self.held:
            refs = decode(name, data, version=version).shards
            self.named[name] = {shard_name(ref.sha256): ref.kind in FORGETTABLE for ref in refs}
            self._judge(name)
        return made

    def delete(self, name: str) -> None:
        self.swept += name.startswith("shards/") and name in self.held
        super().delete(name)
        self.named.pop(name, None)
        for manifest in self.named:
            if name in self.named[manifest]:
                self._judge(manifest)

    def _judge(self, manifest: str) -> None:
        forgotten = {forgotten_of(n) for n in self.held if n.startswith(f"{FORGOTTEN}/")}
        excused = {shard_name(sha256) for sha256 in forgotten if sha256}
        for shard, is_image in self.named[manifest].items():
            if shard not in self.held and not (is_image and shard in excused):
                self.missing.append(f"{manifest} names {shard}")


class Actor:
    """Runs `work` in a thread that waits for its turn before every object operation."""

    def __init__(self, objects: Objects, work: Callable[[Objects], object]) -> None:
        self._objects = objects
        self._go = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._killed = False
        self.ended = False
        self.error: Exception | None = None
        self.next: tuple[str, str] = ("", "")
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()
        self._waits.acquire()

    def step(self) -> None:
        """One operation, and everything up to the next one."""
        if not self.ended:
            self._go.release()
            self._waits.acquire()

    def kill(self) -> None:
        self._killed = True
        while not self.ended:
            self.step()
        self.thread.join()

    def _run(self, work: Callable[[Objects], object]) -> None:
        try:
            work(self)
        except StoreError as error:
            self.error = error
        except Killed:
            pass
        finally:
            self.ended = True
            self._waits.release()

    def _turn(self, verb: str, name: str) -> None:
        self.next = (verb, name)
        self._waits.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def at(self, objects: Objects) -> Actor:
        """The same actor, in the same turns, at another backend."""
        other = copy.copy(self)
        other._objects, other._turn = objects, self._turn  # type: ignore[method-assign]
        return other

    # The verbs: an actor is its own backend.

    def create(self, name: str, data: bytes) -> bool:
        self._turn("create", name)
        return self._objects.create(name, data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        self._turn("read", name)
        return self._objects.read(name, max_bytes=max_bytes)

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        self._turn("list", folder)
        return self._objects.list(folder, after=after)

    def list_names(self, folder: str) -> Sequence[str]:
        self._turn("list", folder)
        return self._objects.list_names(folder)

    def delete(self, name: str) -> None:
        self._turn("delete", name)
        self._objects.delete(name)


def is_there(objects: ClockedObjects, version: int) -> bool:
    return version_name(version) in objects.held
