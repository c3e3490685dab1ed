"""Read the version that a task is learnt on top of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from model_store.errors import StoreNotFound, WrongUsage
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import ClassImages, ClassTokens, Manifest, ShardRef
from model_store.records.signing import Keys
from model_store.store.publish import next_version
from model_store.store.store import Store, check_location
from trainer.request import Learning

Kept = TypeVar("Kept", ClassImages, ClassTokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The channel as it was when training began, and the version that the channel named."""

    location: str
    keys: Keys
    alternates: tuple[str, ...]
    """The stores from which a new store is to borrow."""
    store: Store | None
    """None before the first version: publishing makes the store."""
    head: ChannelRecord | None
    parent: Manifest | None

    def read_shard(self, ref: ShardRef) -> bytes:
        assert self.store is not None, "without a store there is no shard to ask for"
        return self.store.read_shard(ref)

    def made_store(self) -> Store:
        """Open the store, or make it."""
        return self.store or Store.create(self.location, keys=self.keys, alternates=self.alternates)

    def store_now(self) -> Store | None:
        """Open the store, which another run may have made meanwhile."""
        try:
            return self.store or Store.open(self.location, keys=self.keys)
        except StoreNotFound:
            return None

    def without_images_of(self, names: tuple[str, ...]) -> Base:
        """Leave out the images that the store keeps of these classes."""
        assert self.parent is not None
        kept = {
            "memory": tuple(entry for entry in self.parent.memory if entry.class_name not in names),
            "held_out": tuple(
                entry for entry in self.parent.held_out if entry.class_name not in names
            ),
        }
        return replace(self, parent=self.parent.model_copy(update=kept))

    @property
    def memory(self) -> tuple[ClassImages, ...]:
        """List the parent's exemplars, without those that were forgotten since."""
        return self._remembered(self.parent.memory) if self.parent else ()

    @property
    def held_out(self) -> tuple[ClassImages, ...]:
        return self._remembered(self.parent.held_out) if self.parent else ()

    @property
    def statistics(self) -> tuple[ClassTokens, ...]:
        return self._remembered(self.parent.statistics) if self.parent else ()

    @property
    def lacks_images(self) -> bool:
        """Return whether a class that is answered has neither exemplars nor statistics left."""
        assert self.parent is not None
        kept = {entry.class_name for entry in self.memory}
        kept |= {statistics.class_name for statistics in self.statistics}
        return not set(self.parent.classes) <= kept

    def _remembered(self, entries: tuple[Kept, ...]) -> tuple[Kept, ...]:
        forgotten = self.store.forgotten() if self.store else ()
        return tuple(entry for entry in entries if entry.shard.sha256 not in forgotten)


def base_of(request: Learning) -> Base:
    """Read the store, if there is one, and the version that its channel names. With keys, both the
    channel's record and the version have to be trusted.

    Refuse a place in which no store can be made before the training, not after it.
    """
    made = partial(
        Base, location=request.store, keys=request.keys, alternates=tuple(request.alternate)
    )
    try:
        store = Store.open(request.store, keys=request.keys)
    except StoreNotFound:
        check_location(request.store, alternates=request.alternate)
        return made(store=None, head=None, parent=None)
    store.check_alternates(request.alternate)
    head = store.head(request.channel)
    newest = store.newest()
    if head is None and newest is not None:
        raise WrongUsage(
            f"channel {request.channel} names no version to build on; choose one with "
            f"`dne-store promote {newest} --channel {request.channel}`"
        )
    parent = store.resolve(head) if head else None
    next_version(store)  # refuses, before the training, where no number is left
    return made(store=store, head=head, parent=parent)
