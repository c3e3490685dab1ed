"""Define the seam under a store: named, immutable objects of any content.

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
    """Something under the name of an object that cannot be read as one."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is refused: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object in a listing. `modified_s` is a time of the backend's clock, not of ours."""

    name: str
    bytes: int
    modified_s: float


class Objects(Protocol):
    """A backend. The parts of a name are separated by `/`; a name is not a path."""

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless there is one. Return True when ours is there, whole and durable;
        False when there was one before, which is durable and untouched. Raise WriteFailed when
        ours is not there, OutcomeUnknown when nobody can tell."""
        ...

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Read all bytes of an object, once. Raise ObjectMissing where there is none,
        ObjectRefused where it is larger."""
        ...

    def list(self, folder: str, *, after: str = "") -> Sequence[Entry]:
        """List the objects below `folder` with names that sort after `after`, in any order. A
        folder that is not there has none."""
        ...

    def list_names(self, folder: str) -> Sequence[str]:
        """List names as `list` does, without sizes and times, which take longer to find."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object. Afterwards it is gone, whether it was there or not."""
        ...


def check_object_name(name: str) -> list[str]:
    """Split a name into its parts, and refuse names that could lead elsewhere, such as `..`."""
    parts = name.split("/")
    if len(parts) > MAX_NAME_PARTS or not all(NAME_PART.fullmatch(part) for part in parts):
        raise ObjectRefused(ascii(name[:80]), "it is not the name of an object")
    return parts


def parsed(names: Iterable[str], parse: Callable[[str], T | None]) -> list[T]:
    """Parse the names of a listing, and skip those that `parse` does not know."""
    return [key for name in names if (key := parse(name)) is not None]


def keyed(entries: Iterable[Entry], parse: Callable[[str], K | None]) -> dict[K, Entry]:
    """Map the parsed names of a listing to their entries, as `parsed` does."""
    return {key: entry for entry in entries if (key := parse(entry.name)) is not None}
