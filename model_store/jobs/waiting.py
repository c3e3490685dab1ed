"""Find the labels that no version behind a channel's head has used.

A version that was refused, or rolled back, is not behind the head: its labels wait again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from model_store.errors import VersionDeleted
from model_store.inbox.inbox import Inbox
from model_store.inbox.index import Index
from model_store.inbox.reading import Labelled, labelled_items
from model_store.names import is_same, spelt_among
from model_store.records.manifest import Manifest
from model_store.records.tombstone import read_deleted
from model_store.store.store import Store

FEWEST_OF_NEW = 2
"""Images that a new class needs: one to learn from, and one more, as `dne-train` asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A version and its ancestors. `numbers` has also those that were deleted."""

    manifests: tuple[Manifest, ...] = ()
    """The youngest first."""
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Labelled items by class: `known` ones extend their class, and `new` ones become a task.
    `left` tells of each other label why it has to wait."""

    known: Mapping[str, tuple[Labelled, ...]] = field(default_factory=dict)
    new: Mapping[str, tuple[Labelled, ...]] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def items(self) -> int:
        return sum(map(len, (*self.known.values(), *self.new.values())))


def lineage_of(store: Store, manifest: Manifest | None) -> Lineage:
    """Walk from a version to the first one."""
    manifests: list[Manifest] = []
    numbers: set[int] = set()
    following = manifest.version if manifest else None
    while following is not None:
        number = following
        numbers.add(number)
        try:
            found = manifest if manifest and not manifests else store.read_manifest(number)
            manifests.append(found)
            following = found.parent
        except VersionDeleted:
            tombstone = read_deleted(store.objects, number)
            following = tombstone.parent if tombstone else None
    return Lineage(manifests=tuple(manifests), numbers=frozenset(numbers))


def find_waiting(
    store: Store, index: Index, *, head: Manifest | None, but_used_by: Collection[int] = ()
) -> Waiting:
    """Sort the labels that wait by the classes of `head`, the version that a channel names. Labels
    that the versions `but_used_by` have used are left out too."""
    lineage = lineage_of(store, head)
    used_by = lineage.numbers | set(but_used_by)
    items = labelled_items(Inbox(store.objects), index, but_used_by=used_by)
    return sort_labels(items, lineage)


def sort_labels(items: Iterable[Labelled], lineage: Lineage) -> Waiting:
    """Sort labelled items by what the newest version of a lineage makes of their classes."""
    head = lineage.manifests[0] if lineage.manifests else None
    by_name: dict[str, list[Labelled]] = {}
    for item in items:
        by_name.setdefault(_name_now(item, lineage), []).append(item)
    known: dict[str, tuple[Labelled, ...]] = {}
    new: dict[str, tuple[Labelled, ...]] = {}
    left: dict[str, str] = {}
    for name in sorted(by_name):
        some = tuple(sorted(by_name[name], key=lambda one: one.record.id))
        if head is not None and name in head.retired:
            left[name] = (
                "the class was retired; label its images otherwise, or set the name free with "
                "`dne-store rename-class`"
            )
        elif head is not None and name in head.classes:
            known[name] = some
        elif len(some) < FEWEST_OF_NEW:
            left[name] = f"a new class needs at least {FEWEST_OF_NEW} images, and this one has 1"
        else:
            new[name] = some
    return Waiting(known=known, new=new, left=left)


def _name_now(item: Labelled, lineage: Lineage) -> str:
    """Spell a label as the newest version does. A label from before a class was renamed means that
    class; afterwards its old name is free for another one."""
    manifests: Sequence[Manifest] = lineage.manifests
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
