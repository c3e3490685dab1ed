"""Write the labelled pictures of the inbox as a folder a class, as `dne-train add-task` reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from model_store.errors import DataRejected, ItemNotFound, WrongUsage
from model_store.inbox.inbox import Inbox
from model_store.inbox.index import Index
from model_store.inbox.naming import EXTENSIONS
from model_store.inbox.reading import Labelled, in_threads, labelled_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The number of pictures of each class, and the label record of each picture."""

    classes: dict[str, int]
    numbers: dict[str, int]


def export_labelled(inbox: Inbox, index: Index, *, out: Path) -> Exported:
    """Write each labelled picture to `out/CLASS/ID.jpg`. Pictures that are deleted meanwhile are
    left out."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WrongUsage(f"{out} is there already and is not an empty folder: name a new one")
    items = list(labelled_items(inbox, index))
    if not items:
        raise DataRejected("no item of the inbox has a label; `dne-store inbox label` gives one")
    for label in sorted({item.label for item in items}):
        (out / label).mkdir(parents=True, exist_ok=True)
    written = [one for one in in_threads(lambda one: _write(inbox, one, out), items) if one]
    return Exported(
        classes=dict(sorted(Counter(one.label for one in written).items())),
        numbers={one.record.id: one.head.number for one in written},
    )


def _write(inbox: Inbox, item: Labelled, out: Path) -> Labelled | None:
    try:
        data = inbox.picture(item.record)
    except ItemNotFound:
        return None
    name = f"{item.record.id}.{EXTENSIONS[item.record.picture.type]}"
    (out / item.label / name).write_bytes(data)
    return item
