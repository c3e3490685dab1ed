"""List labelled pictures of the inbox as the data of a task, without writing them to a disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import ImageRejected, ItemNotFound, PicturesGone, RecordInvalid
from model_store.loop.class_folders import fill_class_folders
from model_store.loop.inbox import Inbox
from model_store.loop.items import LabelledItem, in_threads
from model_store.records.inbox import ItemRecord
from trainer.data.folders import ClassFolder, Listing


@dataclass(frozen=True, slots=True)
class InboxPicture:
    """A picture that is read from the inbox on demand."""

    inbox: Inbox
    record: ItemRecord

    def __str__(self) -> str:
        return f"item {self.record.id}"

    def read_bytes(self) -> bytes:
        try:
            return self.inbox.picture(self.record)
        except ItemNotFound as error:
            raise _gone() from error
        except RecordInvalid as error:
            raise ImageRejected(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPictures:
    """The pictures as a listing, and the number of the label record of each item."""

    listing: Listing
    numbers: Mapping[str, int]
    lost: int
    """Items that are left out: deleted meanwhile, damaged, or too few of a class."""


def refuse_if_gone(inbox: Inbox, items: Iterable[str]) -> None:
    """Raise PicturesGone if an item that a run has learnt from was deleted since."""

    def is_gone(item: str) -> bool:
        try:
            inbox.item(item)
        except ItemNotFound:
            return True
        return False

    if any(in_threads(is_gone, items)):
        raise _gone()


def _gone() -> PicturesGone:
    return PicturesGone(
        "pictures of the inbox that this run learns from were deleted meanwhile, so no version is "
        "kept; run it again without them"
    )


def list_pictures(
    inbox: Inbox, labels: Mapping[str, Sequence[LabelledItem]], *, folder: Path, fewest: int = 1
) -> LabelledPictures:
    """List the pictures of each class. Leave out classes with fewer than `fewest` pictures.

    `folder` names the data; no folder is made.
    """
    folders = fill_class_folders(inbox, labels, fewest=fewest)
    classes = tuple(
        ClassFolder(name=name, files=tuple(InboxPicture(inbox, record) for record in records))
        for name, records in folders.classes.items()
    )
    return LabelledPictures(
        listing=Listing(folder=folder, classes=classes, ignored=()),
        numbers=folders.numbers,
        lost=sum(map(len, labels.values())) - len(folders.numbers),
    )
