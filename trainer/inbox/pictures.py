"""Write labelled pictures of the inbox to a private folder, and list them as a task's data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import ItemNotFound, RecordInvalid
from model_store.inbox.inbox import Inbox
from model_store.inbox.naming import EXTENSIONS
from model_store.inbox.reading import Labelled, in_threads
from trainer.data.folders import ClassFolder, Listing


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures as a listing, and the number of the label record of each item."""

    listing: Listing
    numbers: Mapping[str, int]
    lost: int
    """Items that were deleted meanwhile, or are damaged."""


def write_pictures(
    inbox: Inbox, labels: Mapping[str, Sequence[Labelled]], *, folder: Path, fewest: int = 1
) -> Pictures:
    """Write the pictures of each class. Leave out classes with less than `fewest` of them.

    Folders have numbers: the name of a class need not be the name of a file. The order of classes
    and of items does not depend on when they are read, so the same labels are the same data.
    """
    classes: list[ClassFolder] = []
    numbers: dict[str, int] = {}
    for place, name in enumerate(sorted(labels)):
        inside = folder / f"{place:05d}"
        inside.mkdir(parents=True)
        written = _write_all(inbox, labels[name], inside)
        if len(written) >= fewest:
            classes.append(ClassFolder(name=name, files=tuple(sorted(written.values()))))
            numbers |= {item: _number(labels[name], item) for item in written}
    asked = sum(map(len, labels.values()))
    listing = Listing(folder=folder, classes=tuple(classes), ignored=())
    return Pictures(listing=listing, numbers=numbers, lost=asked - len(numbers))


def _number(items: Iterable[Labelled], item: str) -> int:
    return next(one.head.number for one in items if one.record.id == item)


def _write_all(inbox: Inbox, items: Sequence[Labelled], folder: Path) -> dict[str, Path]:
    """Write the pictures that are there, and return their files by item."""

    def write(item: Labelled) -> tuple[str, Path] | None:
        try:
            data = inbox.picture(item.record)
        except (ItemNotFound, RecordInvalid):
            return None
        path = folder / f"{item.record.id}.{EXTENSIONS[item.record.picture.type]}"
        path.write_bytes(data)
        return item.record.id, path

    return dict(one for one in in_threads(write, items) if one is not None)
