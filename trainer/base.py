"""Read the version that a task is learnt on top of."""

from __future__ import annotations

from dataclasses import dataclass

from model_store.errors import StoreNotFound, WrongUsage
from model_store.records.channel import ChannelRecord
from model_store.records.manifest import ClassImages, Manifest, ShardRef
from model_store.store.making import check_location
from model_store.store.publish import next_version
from model_store.store.store import Store
from trainer.request import AddTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The channel as it was when training began, and the version that the channel named."""

    location: str
    store: Store | None
    """None before the first version: publishing makes the store."""
    head: ChannelRecord | None
    parent: Manifest | None

    def read_shard(self, ref: ShardRef) -> bytes:
        assert self.store is not None, "without a store there is no shard to ask for"
        return self.store.read_shard(ref)

    def made_store(self) -> Store:
        """Open the store, or make it."""
        return self.store or Store.create(self.location)

    def store_now(self) -> Store | None:
        """Open the store, which another run may have made meanwhile."""
        try:
            return self.store or Store.open(self.location)
        except StoreNotFound:
            return None

    @property
    def memory(self) -> tuple[ClassImages, ...]:
        """List the parent's exemplars, without those that were forgotten since."""
        return self._remembered(self.parent.memory) if self.parent else ()

    @property
    def held_out(self) -> tuple[ClassImages, ...]:
        return self._remembered(self.parent.held_out) if self.parent else ()

    def _remembered(self, entries: tuple[ClassImages, ...]) -> tuple[ClassImages, ...]:
        forgotten = self.store.forgotten() if self.store else ()
        return tuple(entry for entry in entries if entry.shard.sha256 not in forgotten)


def base_of(request: AddTask) -> Base:
    """Read the store, if there is one, and the version that its channel names.

    Refuse a place in which no store can be made before the training, not after it.
    """
    try:
        store = Store.open(request.store)
    except StoreNotFound:
        check_location(request.store)
        return Base(location=request.store, store=None, head=None, parent=None)
    head = store.head(request.channel)
    newest = store.newest()
    if head is None and newest is not None:
        raise WrongUsage(
            f"channel {request.channel} names no version to build on; choose one with "
            f"`dne-store promote {newest} --channel {request.channel}`"
        )
    parent = store.resolve(head) if head else None
    next_version(store)  # refuses, before the training, where no number is left
    return Base(location=request.store, store=store, head=head, parent=parent)
