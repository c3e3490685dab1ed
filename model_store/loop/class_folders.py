"""Sort labelled pictures into one folder a class: on a disk, or as the data of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import DataRejected, ItemNotFound, RecordInvalid, WrongUsage
from model_store.loop.inbox import Inbox
from model_store.loop.index import Index
from model_store.loop.item_names import EXTENSIONS
from model_store.loop.items import LabelledItem, in_threads, labelled_items
from model_store.records.inbox import ItemRecord

WriteFile = Callable[[str, ItemRecord, bytes], None]
"""Write a picture into the folder of a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolders:
    """The pictures of each class, and the number of the label record of each item."""

    classes: Mapping[str, tuple[ItemRecord, ...]]
    numbers: Mapping[str, int]


def fill_class_folders(
    inbox: Inbox,
    labels: Mapping[str, Sequence[LabelledItem]],
    *,
    fewest: int = 1,
    skipping: tuple[type[Exception], ...] = (ItemNotFound, RecordInvalid),
    write: WriteFile | None = None,
) -> ClassFolders:
    """Read each picture, check it, and put it into the folder of its class.

    Leave out pictures whose reading raises an error of `skipping`, and then classes with fewer than
    `fewest` pictures. The order of classes and of pictures does not depend on the order of reading,
    so the same labels are the same data.
    """

    def fill(pair: tuple[str, LabelledItem]) -> tuple[str, LabelledItem] | None:
        name, item = pair
        try:
            picture = inbox.picture(item.record)
        except skipping:
            return None
        if write is not None:
            write(name, item.record, picture)
        return pair

    filled: dict[str, list[LabelledItem]] = {}
    pairs = [(name, item) for name in sorted(labels) for item in labels[name]]
    for pair in in_threads(fill, pairs):
        if pair is not None:
            filled.setdefault(pair[0], []).append(pair[1])
    kept = {
        name: sorted(items, key=lambda item: item.record.id)
        for name, items in filled.items()
        if len(items) >= fewest
    }
    return ClassFolders(
        classes={name: tuple(item.record for item in items) for name, items in kept.items()},
        numbers={item.record.id: item.head.number for items in kept.values() for item in items},
    )


def export_labelled(inbox: Inbox, index: Index, *, out: Path) -> ClassFolders:
    """Write each labelled picture to `out/CLASS/ID.jpg`, as `dne-train add-task` reads it. Leave
    out pictures that are deleted meanwhile."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WrongUsage(f"{out} exists and is not an empty folder: name a new one")
    labels: dict[str, list[LabelledItem]] = {}
    for item in labelled_items(inbox, index):
        labels.setdefault(item.label, []).append(item)
    if not labels:
        raise DataRejected("no item of the inbox has a label; `dne-store inbox label` gives one")
    for name in labels:
        (out / name).mkdir(parents=True, exist_ok=True)

    def write(name: str, record: ItemRecord, picture: bytes) -> None:
        (out / name / f"{record.id}.{EXTENSIONS[record.picture.type]}").write_bytes(picture)

    return fill_class_folders(inbox, labels, skipping=(ItemNotFound,), write=write)
