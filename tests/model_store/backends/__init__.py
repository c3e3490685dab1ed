"""Backends for tests: one in memory, and wrappers that watch or disturb another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from model_store.backends.base import (
    Entry,
    ObjectMissing,
    ObjectRefused,
    Objects,
    check_object_name,
)


class MemoryObjects:
    """Objects in a dict: the smallest backend that keeps the promises of `Objects`."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        check_object_name(name)
        if name in self.held:
            return False
        self.held[name] = data
        return True

    def read(self, name: str, *, max_bytes: int) -> bytes:
        check_object_name(name)
        if name not in self.held:
            raise ObjectMissing(name)
        if len(self.held[name]) > max_bytes:
            raise ObjectRefused(name, "it is too large")
        return self.held[name]

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        check_object_name(folder)
        return [
            Entry(name=name, bytes=len(data), modified_s=0.0)
            for name, data in self.held.items()
            if name.startswith(f"{folder}/") and name > after
        ]

    def list_names(self, folder: str) -> Sequence[str]:
        return [entry.name for entry in self.list(folder)]

    def delete(self, name: str) -> None:
        check_object_name(name)
        self.held.pop(name, None)


class ClockedObjects(MemoryObjects):
    """Objects in memory with a clock of their own, which stands still until it is set."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        super().__init__()
        self.now_s = now_s
        self._modified_s: dict[str, float] = {}

    def create(self, name: str, data: bytes) -> bool:
        made = super().create(name, data)
        if made:
            self._modified_s[name] = self.now_s
        return made

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        return [
            replace(entry, modified_s=self._modified_s[entry.name])
            for entry in super().list(folder, after=after)
        ]


class WatchedObjects:
    """Passes everything on, keeps a list of (verb, name), and calls `before` ahead of each."""

    def __init__(
        self, objects: Objects, *, before: Callable[[str, str], None] = lambda verb, name: None
    ) -> None:
        self.objects = objects
        self.before = before
        self.calls: list[tuple[str, str]] = []

    def create(self, name: str, data: bytes) -> bool:
        self._seen("create", name)
        return self.objects.create(name, data)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        self._seen("read", name)
        return self.objects.read(name, max_bytes=max_bytes)

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        self._seen("list", folder)
        return self.objects.list(folder, after=after)

    def list_names(self, folder: str) -> Sequence[str]:
        self._seen("list", folder)
        return self.objects.list_names(folder)

    def delete(self, name: str) -> None:
        self._seen("delete", name)
        self.objects.delete(name)

    def names(self, verb: str) -> Sequence[str]:
        return [name for called, name in self.calls if called == verb]

    def _seen(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        self.before(verb, name)
