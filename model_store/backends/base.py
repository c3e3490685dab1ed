"""The seam under a store: named, immutable objects, whatever their bytes mean.

Create-if-absent is the only way to write. There is no overwriting, no renaming and no lock, so
every backend that offers these verbs can hold a store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from model_store.errors import StoreError

MAX_NAME_PARTS = 4
MAX_CONFLICTS = 1000  # of one writer that wants a number: each one means that another got on
NAME_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class ObjectMissing(StoreError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not there")
        self.name = name


class ObjectRefused(StoreError):
    """Something is there under that name, and it is nothing that can be read as an object."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is refused: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object in a listing. `modified_s` is by the backend's clock, not by ours."""

    name: str
    bytes: int
    modified_s: float


class Objects(Protocol):
    """What a backend must offer. Names are `/`-separated; a name says nothing about a path."""

    def create(self, name: str, data: bytes) -> bool:
        """True: the object is there now, whole and durable, and it is ours. False: there was
        one before, it is durable, and it is untouched. WriteFailed: there is none of ours.
        OutcomeUnknown: nobody can say."""
        ...

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """All bytes of an object, read once. ObjectMissing; ObjectRefused when it is larger."""
        ...

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        """Every object below `folder` whose name sorts after `after`, in no particular order; none
        where there is no folder."""
        ...

    def list_names(self, folder: str) -> Sequence[str]:
        """The names that `list` would tell: without sizes and times, which cost more to find."""
        ...

    def delete(self, name: str) -> None:
        """The object is gone afterwards, whether it was there or not."""
        ...


def check_object_name(name: str) -> list[str]:
    """The parts of a name: relative, bounded, plain small letters, so never `..` or hidden."""
    parts = name.split("/")
    if len(parts) > MAX_NAME_PARTS or not all(NAME_PART.fullmatch(part) for part in parts):
        raise ObjectRefused(ascii(name[:80]), "it is not the name of an object")
    return parts


def parsed(names: Iterable[str], parse: Callable[[str], T | None]) -> list[T]:
    """Parse the names of a listing, and pass over those that `parse` does not know."""
    return [found for name in names if (found := parse(name)) is not None]


def keyed(entries: Iterable[Entry], parse: Callable[[str], K | None]) -> dict[K, Entry]:
    """Map the parsed names of a listing to their entries, as `parsed` does."""
    return {key: entry for entry in entries if (key := parse(entry.name)) is not None}
