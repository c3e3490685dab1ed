"""Find the labels that wait for learning: those that neither a channel's head nor an ancestor of
it has used.

The labels of a version that was refused or rolled back wait again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from model_store.errors import DataRejected, ItemNotFound, RecordInvalid, VersionDeleted, WrongUsage
from model_store.loop.corrections import Corrections, find_corrections
from model_store.loop.inbox import Inbox
from model_store.loop.index import Index
from model_store.loop.item_names import EXTENSIONS
from model_store.loop.items import LabelledItem, in_threads, labelled_items
from model_store.names import is_same, spelt_among
from model_store.records.inbox import ItemRecord
from model_store.records.manifest import Manifest
from model_store.records.tombstone import read_deleted
from model_store.store.store import Store

FEWEST_OF_NEW = 2
"""Images that a new class needs: one to learn from, and one more, as `dne-train` asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPath:
    """The path from a version back to the first one. `numbers` includes deleted versions."""

    manifests: tuple[Manifest, ...] = ()
    """The manifests that still exist, the newest first."""
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLabels:
    """Labelled items by class. `known` extend their classes, and `new` become a task. `left` maps
    each other label to the reason why it has to wait. `corrections` are of images that are kept."""

    known: Mapping[str, tuple[LabelledItem, ...]] = field(default_factory=dict)
    new: Mapping[str, tuple[LabelledItem, ...]] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    corrections: Corrections = field(default_factory=Corrections)

    @property
    def items(self) -> int:
        """Count the labels and corrections that can be learnt."""
        labels = sum(map(len, (*self.known.values(), *self.new.values())))
        return labels + len(self.corrections.waiting)


def version_path(store: Store, manifest: Manifest | None) -> VersionPath:
    """Walk from a version back to the first one."""
    manifests: list[Manifest] = []
    numbers: set[int] = set()
    following = manifest.version if manifest else None
    while following is not None:
        number = following
        numbers.add(number)
        try:
            ancestor = manifest if manifest and not manifests else store.read_manifest(number)
            manifests.append(ancestor)
            following = ancestor.parent
        except VersionDeleted:
            tombstone = read_deleted(store.objects, number)
            following = tombstone.parent if tombstone else None
    return VersionPath(manifests=tuple(manifests), numbers=frozenset(numbers))


def find_waiting(
    store: Store, index: Index, *, head: Manifest | None, but_used_by: Collection[int] = ()
) -> WaitingLabels:
    """Sort the labels that wait by the classes of `head`, the version that a channel names. Also
    leave out labels that the versions `but_used_by` have used."""
    path = version_path(store, head)
    used_by = path.numbers | set(but_used_by)
    items = labelled_items(Inbox(store.objects), index, but_used_by=used_by)
    return replace(_sort_labels(items, path), corrections=find_corrections(store, head))


def _sort_labels(items: Iterable[LabelledItem], path: VersionPath) -> WaitingLabels:
    """Sort labelled items into classes that the newest version knows, new classes, and the rest."""
    head = path.manifests[0] if path.manifests else None
    by_name: dict[str, list[LabelledItem]] = {}
    for item in items:
        by_name.setdefault(_name_now(item, path), []).append(item)
    known: dict[str, tuple[LabelledItem, ...]] = {}
    new: dict[str, tuple[LabelledItem, ...]] = {}
    left: dict[str, str] = {}
    for name in sorted(by_name):
        some = tuple(sorted(by_name[name], key=lambda item: item.record.id))
        if head is not None and name in head.retired:
            left[name] = (
                "the class was retired; give its images another label, or free the name with "
                "`dne-store rename-class`"
            )
        elif head is not None and name in head.classes:
            known[name] = some
        elif len(some) < FEWEST_OF_NEW:
            left[name] = f"a new class needs at least {FEWEST_OF_NEW} images, and this one has 1"
        else:
            new[name] = some
    return WaitingLabels(known=known, new=new, left=left)


def _name_now(item: LabelledItem, path: VersionPath) -> str:
    """Spell a label as the newest version does. A label given before a class was renamed means that
    class; after the renaming, the old name is free for another class."""
    manifests: Sequence[Manifest] = path.manifests
    if not manifests:
        return item.label
    now = manifests[0].spec.classes
    for place in range(len(manifests) - 1, 0, -1):
        parent, child = manifests[place], manifests[place - 1]
        if item.head.time < child.created and parent.spec.classes != child.spec.classes:
            for position, name in enumerate(parent.spec.classes):
                renamed = name != child.spec.classes[position]
                if renamed and is_same(name, item.label):
                    return now[position]
    return spelt_among(item.label, now) or item.label


_WriteFile = Callable[[str, ItemRecord, bytes], None]
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
    write: _WriteFile | None = None,
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
